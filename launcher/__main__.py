"""What can be run here? ``python -m launcher``, a node's agent; ``python -m launcher plan``, what would be started."""

from __future__ import annotations

import json
import os
import sys

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run the agent, or the plan of the layout on standard input; return the exit status."""
    if arguments == ["plan"]:
        return _plan()
    if arguments:
        sys.stderr.write("usage: python -m launcher        (started by rpcrl)\n")
        sys.stderr.write("       python -m launcher plan   (layout as JSON on standard input)\n")
        return 2
    from launcher import agent

    return agent.main()


def _plan() -> int:
    from launcher.devices import Inventory, find_devices
    from launcher.plan import Node, plan_layout
    from rpcrl import env

    try:
        layout = json.load(sys.stdin)
    except ValueError as error:
        sys.stderr.write(f"standard input is not JSON: {error}\n")
        return 2
    if not isinstance(layout, dict):
        sys.stderr.write("the layout must be one JSON object with the key 'groups'\n")
        return 2
    environment = env.snapshot()
    given = layout.get("devices")
    if isinstance(given, list):
        inventory = Inventory(tuple(str(device) for device in given), "the layout's devices")
    elif _wants_cuda(layout):
        inventory = find_devices(environment)
    else:
        inventory = Inventory()
    node = Node(
        run_id=str(layout.get("run_id", "dry-run")),
        log_dir=str(layout.get("log_dir", "logs")),
        python=sys.executable,
        agent_pid=os.getpid(),
        environment=environment,
        inventory=inventory,
    )
    answer = plan_layout(layout, node)
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    return 2 if answer["violations"] else 0


def _wants_cuda(layout: dict[str, object]) -> bool:
    groups = layout.get("groups")
    return isinstance(groups, list) and any(
        isinstance(group, dict) and group.get("device") == "cuda" for group in groups
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
