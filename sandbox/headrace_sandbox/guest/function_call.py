"""Runs inside a sandbox, in the process of a submission: calls one of its functions, and writes the result as data.

This program contains no secret and decides nothing: a submission that takes it over can only write another answer. The
text of ``values.py`` precedes it.
"""

import json
import sys

from headrace_sandbox.guest.values import decode, encode


def call(source: str, function: str, arguments: list[object]) -> object:
    module = type(sys)("submission")
    sys.modules["submission"] = module
    exec(compile(source, "submission.py", "exec", dont_inherit=True), module.__dict__)
    *owners, name = function.split(".")
    target: object = module
    for owner in owners:
        target = getattr(target, owner)()
    value: object = getattr(target, name)(*arguments)
    return value


def main() -> None:
    answer, sys.stdout = sys.stdout, sys.stderr  # the submission's own output is not an answer
    request = json.load(sys.stdin)
    value = call(request["source"], request["function"], decode(request["arguments"]))
    answer.write(json.dumps(encode(value)))
    answer.flush()


if __name__ == "__main__":
    main()
