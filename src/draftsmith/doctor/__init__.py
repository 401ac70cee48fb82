"""Is this machine, process and run safe from the compiler's races? `draftsmith doctor`, or `doctor.run_checks()`."""

from draftsmith.doctor.check import Check
from draftsmith.doctor.checks import CHECKS, run_checks

__all__ = ["CHECKS", "Check", "run_checks"]
