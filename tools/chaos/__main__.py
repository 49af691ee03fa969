"""Entry of both roles: `python tools/chaos [options]` supervises; the supervisor starts `... worker OPTIONS` itself."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        from chaos.worker import main as worker

        sys.exit(worker(sys.argv[2]))
    from chaos.supervisor import main

    sys.exit(main())
