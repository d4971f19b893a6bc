"""Builds the wheel: the package, the shared library and their metadata in one archive.
It is a build backend (PEP 517) that needs no other package, so that `make wheel` and
`pip wheel ./pytorch` work without a network. The version is that of internal/version.

    python3 pytorch/backend.py dist
"""

import base64
import hashlib
import os
import pathlib
import platform
import sys
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
LIBRARY = "stowage/libstowage.so"


def version():
    return (HERE.parent / "internal" / "version" / "VERSION").read_text().strip()


def library():
    path = pathlib.Path(os.environ.get("STOWAGE_LIBRARY") or HERE.parent / "build" / "libstowage.so")
    if not path.is_file():
        sys.exit(f"there is no library at {path}; build it with `make wheel`, or set STOWAGE_LIBRARY")
    return path.read_bytes()


def metadata():
    head = [
        "Metadata-Version: 2.1",
        "Name: stowage",
        f"Version: {version()}",
        "Summary: Train any PyTorch model in less device memory",
        "License: Apache-2.0",
        "Requires-Python: >=3.10",
        "Requires-Dist: torch (>=1.13)",
        "Description-Content-Type: text/markdown",
    ]
    return "\n".join(head) + "\n\n" + (HERE.parent / "docs" / "PYTORCH.md").read_text()


def tag():
    return f"py3-none-linux_{platform.machine()}"


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    info = f"stowage-{version()}.dist-info"
    files = {str(p.relative_to(HERE)): p.read_bytes() for p in sorted((HERE / "stowage").rglob("*")) if p.suffix == ".py" or p.name == "py.typed"}
    files["stowage/VERSION"] = f"{version()}\n".encode()
    files[LIBRARY] = library()
    files[f"{info}/METADATA"] = metadata().encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: stowage\nRoot-Is-Purelib: false\nTag: {tag()}\n".encode()
    files[f"{info}/LICENSE"] = (HERE.parent / "LICENSE").read_bytes()
    rows = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(data)}\n")
    files[f"{info}/RECORD"] = ("".join(rows) + f"{info}/RECORD,,\n").encode()
    wheel = f"stowage-{version()}-{tag()}.whl"
    folder = pathlib.Path(wheel_directory)
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / wheel, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))  # the same files give the same wheel
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if name == LIBRARY else 0o644) << 16
            z.writestr(entry, data)
    return wheel


def build_sdist(sdist_directory, config_settings=None):
    raise SystemExit("there is no source distribution; build a wheel from the repository with `make wheel`")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python3 backend.py FOLDER")
    print(pathlib.Path(sys.argv[1]) / build_wheel(sys.argv[1]))
