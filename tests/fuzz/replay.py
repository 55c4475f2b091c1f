"""`python -m fuzz.replay FILE...`: tries saved cases or lines of the corpus again."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from fuzz.inputs.cases import case_of
from fuzz.subjects import Subjects, make_families
from fuzz.trial import try_case
from fuzz.workers import Worker


def main(paths: list[str]) -> int:
    lines = [(path, line) for path in paths for line in Path(path).read_text(encoding="utf-8").splitlines()]
    cases = [(path, case_of(json.loads(line))) for path, line in lines]
    families = sorted({case.subject.partition(":")[2] for _, case in cases})
    failed = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, Worker() as worker:
        subjects = Subjects(make_families(Path(folder) / "subjects", families), families)
        for path, case in cases:
            faults = try_case(case, subjects, worker)
            failed += bool(faults)
            result = "; ".join(f"{fault.kind}: {fault.detail}" for fault in faults) or "as it should be"
            sys.stdout.write(f"{path} {json.dumps(case.json())[:120]}\n    {result}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
