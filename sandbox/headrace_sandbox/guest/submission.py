"""Runs inside a sandbox, as the submission's process: answers the questions of unit tests, as data.

This program decides nothing. The text of ``values.py`` precedes it.
"""

import json
import os
import sys
from typing import Any

from headrace_sandbox.guest.values import decode, encode


class QuestionHandler:
    """Answers questions; objects that are not data stay in this process, under a number."""

    def __init__(self, module: object) -> None:
        self._objects: list[Any] = [module]

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer a question."""
        try:
            value = self._evaluate(question)
        except StopIteration:
            return {"stop": True}
        except BaseException as error:  # noqa: BLE001 - an exception of the submission is an answer
            return {"raised": type(error).__name__, "message": str(error)}
        try:
            return {"value": encode(value)}
        except (TypeError, RecursionError):
            self._objects.append(value)
            return {"object": len(self._objects) - 1, "kind": type(value).__name__}

    def _evaluate(self, question: dict[str, Any]) -> Any:
        target = self._objects[question["of"]]
        arguments = [self._argument(item) for item in question.get("arguments", [])]
        keywords = {name: self._argument(item) for name, item in question.get("named", {}).items()}
        operation = question["what"]
        if operation == "get":
            return getattr(target, question["name"])
        if operation == "call":
            return target(*arguments, **keywords)
        if operation == "str":
            return str(target)
        return getattr(type(target), operation)(target, *arguments)

    def _argument(self, item: dict[str, Any]) -> Any:
        return self._objects[item["object"]] if "object" in item else decode(item["value"])


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the submission's own output is not an answer
    questions = os.fdopen(os.dup(0), "r")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    request = json.loads(questions.readline())
    module = type(sys)(request["module"])
    sys.modules[request["module"]] = module
    exec(compile(request["source"], request["module"] + ".py", "exec", dont_inherit=True), module.__dict__)
    handler = QuestionHandler(module)
    answers.write('{"ready": true}\n')
    answers.flush()
    for line in questions:
        answers.write(json.dumps(handler.answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
