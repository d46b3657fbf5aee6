"""What a user can mend, and what the machines did: commands print these two errors without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable


class InputError(ValueError):
    """Something the user gave is wrong. The message names the file, line or key, the reason and what to do."""


class LostWorkersError(RuntimeError):
    """Processes of a training died for good. Its checkpoint is kept: the message says how to go on."""


def exit_on_input_error(main: Callable[[], None]) -> None:
    """Run a command; an InputError becomes one readable message and exit code 2, lost workers one and exit code 3."""
    try:
        main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except LostWorkersError as error:
        print(f"stopped: {error}", file=sys.stderr)
        raise SystemExit(3) from None
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None
