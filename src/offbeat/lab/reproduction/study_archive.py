"""Archives of a study: one zip file with all that its table, claims and figures are computed from.

An archive is thinned. It has the metrics of each run, computed from all of its records, and those records and fields
that quantities and plots of the study read besides. Its manifest lists these quantities and plots; a study that asks
for others is refused when the archive is read.
"""

from __future__ import annotations

import contextlib
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from offbeat.errors import ConfigurationError, shortened
from offbeat.lab.reproduction.runs import MANIFEST, METRICS, STUDY_COPY, read_manifest, read_study
from offbeat.lab.reproduction.study import Study, StudyRun
from offbeat.lab.reproduction.study_reads import drawn_from_records, reads_of
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
    reads = {case.label: union(map(reads_of, study.names_read(case.label))) for case in study.cases}
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
    computable = {case.label: drawn_from_records(study, case.label) for case in study.cases}
    return msgspec.json.encode(msgspec.structs.replace(read_manifest(directory), thinned=computable)) + b"\n"


def _run_files(run: StudyRun, reads: Reads, directory: Path) -> dict[str, bytes]:
    """The files of a run by name; the records of all ranks of a live run are in one."""
    assert run.records.directory is not None
    place = run.records.directory.relative_to(directory).as_posix()
    return {
        f"{place}/{HEADER}": (run.records.directory / HEADER).read_bytes(),
        f"{place}/{METRICS}": msgspec.json.encode(msgspec.structs.replace(run.summary, directory=None)) + b"\n",
        f"{place}/{RECORDS}": b"".join(msgspec.json.encode(record) + b"\n" for record in thin(run.records, reads)),
    }


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
            raise ConfigurationError(f"{path} cannot be read ({shortened(error)}); name another archive") from None
        yield Path(directory)
