"""`unsafe` stays in the files that CONTRIBUTING.md names."""

import re
import sys
from pathlib import Path

ALLOWED = {"rust/kvsplice/src/simd.rs", "rust/kvsplice-py/src/plain_ints.rs"}

root = Path(__file__).parent.parent
found = {
    str(path.relative_to(root))
    for path in root.glob("rust/**/*.rs")
    if re.search(r"^[^/]*\bunsafe\b", path.read_text(), re.MULTILINE)
}
if found != ALLOWED:
    sys.exit(f"unsafe code is in {sorted(found)} and should be in {sorted(ALLOWED)}")
print(f"unsafe code only in {', '.join(sorted(ALLOWED))}")
