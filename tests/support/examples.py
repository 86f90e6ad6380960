"""How many examples a property test draws: what it asks for under the profile `ci`, a fifth of that under `quick`,
twenty times as many under `thorough`."""

import os

from hypothesis import settings

VARIABLE = "BAOC_EXAMPLES"  # environment variable: the name of the profile
SHARES = {"ci": 1.0, "quick": 0.2, "thorough": 20.0}


def load_profile() -> None:
    """Clocks decide nothing and examples are the same in every run, in all profiles."""
    for name, share in SHARES.items():
        examples = round(100 * share)
        settings.register_profile(name, max_examples=examples, deadline=None, derandomize=True, print_blob=True)
    settings.load_profile(os.environ.get(VARIABLE, "ci"))


def examples(count: int) -> settings:
    """`count` examples under `ci`, for tests whose examples cost more or less than most."""
    return settings(max_examples=max(1, round(count * settings.default.max_examples / 100)))
