"""Regenerate grid.net.xml and bottleneck.net.xml from the plain node, edge and connection files.

Only needed after an edit of the plain files. netconvert comes with the eclipse-sumo package (pip
install eclipse-sumo); running the environments needs libsumo alone.

    python envs/assets/build_nets.py [path/to/netconvert]
"""

import re
import subprocess
import sys
from pathlib import Path


def build(name: str, netconvert: str, assets: Path) -> None:
    """Write assets/<name>.net.xml."""
    plain = {"node-files": "nod", "edge-files": "edg", "connection-files": "con"}
    files = [f"--{flag}={name}.{ext}.xml" for flag, ext in plain.items()]
    options = ["--no-turnarounds", f"--output-file={name}.net.xml"]
    subprocess.run([netconvert, *files, *options], cwd=assets, check=True)
    net = assets / f"{name}.net.xml"
    # netconvert writes the date and its own command line into a comment: without it, equal
    # sources give equal bytes
    net.write_text(re.sub(r"<!--.*?-->\s*", "", net.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    for task in ("grid", "bottleneck"):
        build(task, sys.argv[1] if len(sys.argv) > 1 else "netconvert", Path(__file__).parent)
