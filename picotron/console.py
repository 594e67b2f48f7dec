"""Errors that users can fix, as sentences."""


class UserError(ValueError):
    """Mistakes that the user can fix. The message is all that the user needs, so programs print no traceback.

    Args:
        problems: one sentence for each mistake, with the value and the remedy.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return "\n".join([f"{len(self.problems)} problems:", *(f"  - {problem}" for problem in self.problems)])
