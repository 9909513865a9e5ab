"""What `import pacedio` costs: `python -c 'import pacedio'` against `python -c pass`, taking turns.

With bytecode cached, as an installed package has it, whatever PYTHONDONTWRITEBYTECODE says here.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

import common
from common import Targets

COMMANDS = {"pass": "pass", "import pacedio": "import pacedio"}
UNWANTED = ("anyio", "rich", "argparse", "logging")
MOST = 1.7
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def seconds(code: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdin=subprocess.DEVNULL, env=ENVIRONMENT)
    return time.perf_counter() - began


def loaded() -> list[str]:
    """Those of the modules that must not come with the import that do."""
    code = f"import sys, pacedio; print(*(name for name in {UNWANTED!r} if name in sys.modules))"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()


def main() -> None:
    p = common.parser(__doc__)
    p.add_argument("--runs", type=int, default=40, help="of each command (default 40)")
    a = p.parse_args()
    for code in COMMANDS.values():
        seconds(code)
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    order = list(COMMANDS)
    for _ in range(a.runs):
        for name in order:
            times[name].append(seconds(COMMANDS[name]))
        order.reverse()
    ratio = {of.__name__: of(times["import pacedio"]) / of(times["pass"]) for of in (statistics.median, min)}
    rows = [[f"`python -c {name!r}`", common.spread((t * 1000 for t in own), 1)] for name, own in times.items()]
    targets = Targets()
    targets.at_most("import pacedio: time / pass, of medians", [ratio["median"]], MOST)
    targets.at_most("import pacedio: time / pass, of the least", [ratio["min"]], MOST)
    targets.equal("of anyio, rich, argparse and logging it loads", ", ".join(loaded()) or "none", "none")
    env = {**common.environment(), "runs": f"{a.runs} of each, taking turns"}
    sections = [common.table(("command", "ms"), rows), str(targets)]
    common.publish(a, common.report("Importing pacedio", env, sections), {"environment": env, "seconds": times})


if __name__ == "__main__":
    main()
