"""Runs inside a sandbox, as the submission's process: answers what unit tests ask, as data.

Nothing here decides. The text of ``values.py`` stands before it.
"""

import json
import os
import sys
from typing import Any

from headrace_sandbox.guest.values import decoded, encoded


class Answers:
    """Answers to questions; objects that are not data stay here, under a number."""

    def __init__(self, module: object) -> None:
        self._objects: list[Any] = [module]

    def to(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The answer to a question."""
        try:
            value = self._ask(asked)
        except StopIteration:
            return {"stop": True}
        except BaseException as error:  # noqa: BLE001 - whatever the submission raises is an answer
            return {"raised": type(error).__name__, "message": str(error)}
        try:
            return {"value": encoded(value)}
        except (TypeError, RecursionError):
            self._objects.append(value)
            return {"object": len(self._objects) - 1, "kind": type(value).__name__}

    def _ask(self, asked: dict[str, Any]) -> Any:
        target = self._objects[asked["of"]]
        arguments = [self._argument(item) for item in asked.get("arguments", [])]
        named = {name: self._argument(item) for name, item in asked.get("named", {}).items()}
        what = asked["what"]
        if what == "get":
            return getattr(target, asked["name"])
        if what == "call":
            return target(*arguments, **named)
        if what == "str":
            return str(target)
        return getattr(type(target), what)(target, *arguments)

    def _argument(self, item: dict[str, Any]) -> Any:
        return self._objects[item["object"]] if "object" in item else decoded(item["value"])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the submission's own output is not an answer
    questions = os.fdopen(os.dup(0), "r")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    begun = json.loads(questions.readline())
    module = type(sys)(begun["module"])
    sys.modules[begun["module"]] = module
    exec(compile(begun["source"], begun["module"] + ".py", "exec", dont_inherit=True), module.__dict__)
    mine = Answers(module)
    answers.write('{"ready": true}\n')
    answers.flush()
    for line in questions:
        answers.write(json.dumps(mine.to(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
