"""The one error for what a user can cause and mend. Commands print it without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable


class InputError(ValueError):
    """Something the user gave is wrong. The message names the file, line or key, the reason and what to do."""


def exit_on_input_error(main: Callable[[], None]) -> None:
    """Run a command; an InputError becomes one readable message and exit code 2."""
    try:
        main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None
