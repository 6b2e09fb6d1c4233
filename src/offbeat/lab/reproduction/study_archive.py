"""Archives of a study: one zip file with the records that its table, claims and figures are computed from.

An archive is thinned: records and fields that are not read are left out, and its manifest lists what can be computed
from the rest. A study that asks for more than that is refused when the archive is read.
"""

from __future__ import annotations

import contextlib
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from offbeat.errors import ConfigurationError
from offbeat.lab.plots.figures import cell_reads
from offbeat.lab.reproduction.quantities import QUANTITIES
from offbeat.lab.reproduction.runs import MANIFEST, STUDY_COPY, read_manifest, read_study
from offbeat.lab.reproduction.study import Study, StudyRun
from offbeat.lab.reproduction.timings import TIMINGS
from offbeat.records.files import HEADER, RECORDS
from offbeat.records.thinning import Reads, thin, union


def archive(directory: Path, path: Path) -> Path:
    """Write what a study reads of its runs that have ended to a zip file; equal records give equal bytes.

    directory: the directory of the study, thinned already or not
    path: the zip file, which is replaced
    """
    study, runs = read_study(directory)
    files = {
        MANIFEST: _thinned_manifest(study, directory),
        **{name: (directory / name).read_bytes() for name in (STUDY_COPY, TIMINGS) if (directory / name).is_file()},
    }
    reads = {case.label: union(_reads(name) for name in study.names_read(case.label)) for case in study.cases}
    for run in runs:
        files |= _run_files(run, reads[run.case], directory)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_zip(path, files)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {path} ({error.strerror}); the records are in {directory}, to be saved elsewhere"
        ) from None
    return path


def _thinned_manifest(study: Study, directory: Path) -> bytes:
    computable = {case.label: sorted(study.names_read(case.label)) for case in study.cases}
    return msgspec.json.encode(msgspec.structs.replace(read_manifest(directory), thinned=computable)) + b"\n"


def _reads(name: str) -> Reads:
    """What a quantity or a cell of a figure reads."""
    return QUANTITIES[name].reads if name in QUANTITIES else cell_reads(name)


def _run_files(run: StudyRun, reads: Reads, directory: Path) -> dict[str, bytes]:
    """The files of a run by name; the records of all ranks of a live run are in one."""
    assert run.records.directory is not None
    place = run.records.directory.relative_to(directory).as_posix()
    lines = b"".join(msgspec.json.encode(record) + b"\n" for record in thin(run.records, reads))
    return {f"{place}/{HEADER}": (run.records.directory / HEADER).read_bytes(), f"{place}/{RECORDS}": lines}


def _write_zip(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2, compresslevel=9) as archive_file:
        for name, contents in files.items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type, entry.external_attr = zipfile.ZIP_BZIP2, 0o644 << 16
            archive_file.writestr(entry, contents)


@contextlib.contextmanager
def open_results(path: Path) -> Iterator[Path]:
    """The directory of a study, from a directory or an archive."""
    if path.suffix != ".zip":
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="offbeat-") as directory:
        try:
            with zipfile.ZipFile(path) as archive_file:
                archive_file.extractall(directory)  # zipfile removes .. and absolute paths from names
        except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:  # RuntimeError: encrypted
            raise ConfigurationError(f"{path} cannot be read ({error}); name another archive") from None
        yield Path(directory)
