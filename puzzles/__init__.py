"""Puzzles: fill in a function, and `python -m puzzles NUMBER` checks it. docs/puzzles.md describes how to
check the functions of another package.

p01_*.py, ...       the puzzles, which you edit
checks/             their checks; they compare with torch's own functions, so any correct implementation is accepted
solutions/          a solution of each puzzle, which `--solution` prints
catalogue.py        titles, pages and hints
group.py            the ranks of a puzzle: real processes, whose messages are counted
answers.py          the learner's code, and what it raises
report.py           the report of a check
tensors.py          comparisons of tensors
pictures.py         pictures of answers
harness.py          runs a check, survives endless loops
"""
