"""Which rank a process is, by the environment variables of launchers."""

from __future__ import annotations

import dataclasses
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from offbeat.errors import ConfigurationError
from offbeat.launch.listeners import open_listener
from offbeat.launch.rank_info import RankInfo, environment_of, first_host, read_rank_info
from offbeat.launch.token_files import joining_token, read_token, shared_token
from offbeat.transports.address import Address
from offbeat.transports.tls import Credentials, Tls

SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "123456", "SLURM_NNODES": "1"}
SECRET = b"a secret that is long enough"
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{SECRET.decode()}\n")
    path.chmod(0o600)
    return path


def test_without_a_launcher_a_process_is_alone() -> None:
    assert read_rank_info({"HOME": "/root"}) == RankInfo(0, 1, None, None, None, None, False, "alone")


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "host.example"])
def test_rank_info_is_passed_through_the_environment_unchanged(host: str, tmp_path: Path) -> None:
    tls = Tls(mode="on", certificate="a.pem", key="b.pem", ca="c.pem")
    credentials = Credentials(b"\x00\xff" + SECRET, tls)
    given = RankInfo(2, 4, Address(host, 7700), credentials, None, tmp_path, True, "offbeat", "me")
    assert read_rank_info(environment_of(given)) == given
    again = dataclasses.replace(given, rank=0, incarnation=2, began=12345.678901234567)
    assert read_rank_info(environment_of(again)) == again


def test_variables_of_offbeat_precede_torchrun_and_torchrun_precedes_slurm() -> None:
    of_offbeat = environment_of(RankInfo(3, 5, Address("127.0.0.1", 1), Credentials(SECRET)))
    assert read_rank_info({**of_offbeat, **TORCHRUN, **SLURM}).launcher == "offbeat"
    alone = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}
    assert read_rank_info({**alone, **SLURM}) == RankInfo(0, 1, launcher="torchrun")
    assert read_rank_info(SLURM).launcher == "slurm"


WORKER = {"OFFBEAT_RANK": "0", "OFFBEAT_PROCESSES": "2", "OFFBEAT_ADDRESS": "127.0.0.1:1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH], ids=["open mpi", "mpich"])
def test_mpirun_precedes_the_slurm_job_around_it_and_selects_mpi(variables: dict[str, str], tmp_path: Path) -> None:
    rank_info = read_rank_info({**SLURM, **variables, "OFFBEAT_DIRECTORY": str(tmp_path), "OFFBEAT_RESUME": "1"})
    assert rank_info == RankInfo(
        2, 4, directory=tmp_path, resume=True, launcher="mpirun", transport="mpi", first_here=False
    )
    assert not rank_info.alone
    assert read_rank_info({**variables, **TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}).launcher == "torchrun"


def test_mpirun_with_one_process_leaves_it_alone() -> None:
    rank_info = read_rank_info(
        {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        transport="tcp",
    )
    assert rank_info == RankInfo(0, 1, launcher="mpirun")
    assert rank_info.alone


def test_srun_uses_mpi_only_on_request() -> None:
    by_mpi = read_rank_info({**SLURM, "OFFBEAT_TRANSPORT": "mpi"})
    assert read_rank_info(SLURM, "mpi") == by_mpi == RankInfo(2, 4, launcher="slurm", transport="mpi")
    assert (
        read_rank_info({**SLURM, "OFFBEAT_TRANSPORT": "tcp"})
        == read_rank_info({**SLURM, "OFFBEAT_TRANSPORT": "auto"})
        == read_rank_info(SLURM)
    )
    assert read_rank_info({**SLURM, "PMI_RANK": "2", "PMI_SIZE": "4"}).transport == "tcp"


def test_a_listener_is_passed_by_its_file_descriptor() -> None:
    assert read_rank_info({"OFFBEAT_RANK": "0", "OFFBEAT_PROCESSES": "2", "OFFBEAT_LISTENER": "7"}).listener == 7


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"OFFBEAT_RANK": "x"}, "OFFBEAT_RANK is a whole number of at least 0, but it is 'x' here"),
        (
            {**OPEN_MPI, "OFFBEAT_TRANSPORT": "tcp"},
            "processes that mpirun starts are connected by MPI, not by TCP; start",
        ),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK is 4, but OMPI_COMM_WORLD_SIZE is 4"),
        ({"OFFBEAT_TRANSPORT": "mpx"}, "unknown transport 'mpx'; did you mean 'mpi'"),
        ({"OFFBEAT_RANK": "0"}, "OFFBEAT_PROCESSES is a whole number of at least 1, but it is '' here"),
        ({"OFFBEAT_RANK": "1", "OFFBEAT_PROCESSES": "2"}, "rank 1 does not know where rank 0 is; set OFFBEAT_ADDRESS"),
        ({**WORKER, "OFFBEAT_TOKEN": "xy"}, "OFFBEAT_TOKEN does not hold"),
        (WORKER, "OFFBEAT_ADDRESS is set, but no token; set OFFBEAT_TOKEN_FILE"),
        ({**WORKER, "OFFBEAT_TOKEN": "ab", "OFFBEAT_TLS": "on"}, "the token has 1 characters, but at least 22"),
        ({**WORKER, "OFFBEAT_TOKEN": "ab" * 32, "OFFBEAT_TLS": "no"}, "unknown TLS mode 'no'"),
        ({**WORKER, "OFFBEAT_TOKEN": "ab" * 32, "OFFBEAT_CA": "x"}, "need all three files: --certificate FILE --key"),
        (TORCHRUN, "torchrun started this run on several machines, .* needs a token; set OFFBEAT_TOKEN_FILE"),
        ({**TORCHRUN, "RANK": "4"}, "RANK is 4, but WORLD_SIZE is 4, and ranks count from 0"),
        ({**SLURM, "SLURM_NNODES": "2"}, "SLURM started this run on several machines, .* needs a token"),
    ],
)
def test_an_invalid_environment_is_answered_with_one_sentence(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        read_rank_info(environment)


# SLURM


def test_tasks_of_one_node_use_loopback_a_port_of_their_job_and_a_token_that_only_their_user_can_read() -> None:
    task = read_rank_info(SLURM)
    credentials = Credentials(shared_token("slurm-123456--"))
    assert task == RankInfo(2, 4, Address("127.0.0.1", 20_000 + 3456), credentials, launcher="slurm")
    assert read_rank_info({**SLURM, "SLURM_PROCID": "0"}).credentials == credentials
    assert read_rank_info({**SLURM, "SLURM_STEP_ID": "1"}).credentials != credentials


def test_tasks_of_several_nodes_use_the_first_one_and_a_token(token_file: Path) -> None:
    rank_info = read_rank_info(
        {**SLURM, "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[07-08]", "OFFBEAT_TOKEN_FILE": str(token_file)}
    )
    assert (rank_info.address, rank_info.credentials) == (Address("n07", 23_456), Credentials(SECRET))


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[01-04,7],gpu3", "node01"),
        ("node[7,9-11]", "node7"),
        ("rack[2-3]-n[10-12]", "rack2-n10"),
        ("a-b[003]", "a-b003"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_slurm_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


# torchrun


def test_processes_under_torchrun_find_rank_0_through_its_store() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
    hub, worker = read_rank_info({**env, "RANK": "0"}), read_rank_info({**env, "RANK": "1"})
    assert hub.launcher == worker.launcher == "torchrun"
    assert hub.address == worker.address
    assert hub.credentials == worker.credentials == Credentials(shared_token(f"torchrun-test_0-{store.port}"))
    assert worker.listener is None
    assert hub.listener is not None
    with socket.socket(fileno=hub.listener) as listener:
        assert hub.address is not None
        assert listener.getsockname() == ("127.0.0.1", hub.address.port)
    next_hub, next_worker = (
        read_rank_info({**env, "RANK": "0"}),
        read_rank_info({**env, "RANK": "1"}),
    )  # the next run of the same script
    assert next_hub.address == next_worker.address
    assert next_hub.credentials == next_worker.credentials
    assert next_hub.listener is not None
    socket.socket(fileno=next_hub.listener).close()


# Tokens and listeners


def test_a_token_is_the_stripped_content_of_its_file(token_file: Path) -> None:
    assert read_token(token_file) == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622])
def test_a_token_file_that_others_can_read_or_write_is_refused(token_file: Path, mode: int) -> None:
    token_file.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"other users can read the token file {token_file}; type: chmod 600"):
        read_token(token_file)


def test_a_token_file_that_is_missing_or_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: no such file or directory; to make one type"):
        read_token(tmp_path / "none")
    (tmp_path / "empty").touch(0o600)
    with pytest.raises(ConfigurationError, match="is empty; to make a token type"):
        read_token(tmp_path / "empty")
    (tmp_path / "empty").write_text("short")
    with pytest.raises(ConfigurationError, match="has 5 characters, but at least 22 random ones are needed"):
        read_token(tmp_path / "empty")


def test_a_listener_for_this_machine_has_a_random_token() -> None:
    listeners = [open_listener(None, None) for _ in range(2)]
    assert all(
        address == Address(*listener.getsockname()) and address.is_loopback for listener, address, _ in listeners
    )
    assert listeners[0][2] != listeners[1][2]
    for listener, _, _ in listeners:
        listener.close()


def test_a_listener_on_a_given_loopback_address_has_a_token_that_processes_of_the_same_user_find() -> None:
    listener, address, credentials = open_listener("127.0.0.1:0", None)
    assert address.port == listener.getsockname()[1]
    assert credentials.token == joining_token(address, None)
    with pytest.raises(ConfigurationError, match="needs the token of the run; give it with --token-file FILE"):
        joining_token(Address("10.0.0.1", address.port), None)
    with pytest.raises(ConfigurationError, match=f"port {address.port} of 127.0.0.1 is taken; choose another, or 0"):
        open_listener(str(address), None)
    listener.close()


def test_a_listener_for_other_machines_needs_a_token_and_is_reachable_from_this_one() -> None:
    with pytest.raises(ConfigurationError, match=r"0\.0\.0\.0:0 lets other machines in, which needs a token"):
        open_listener("0.0.0.0:0", None)
    listener, address, credentials = open_listener("0.0.0.0:0", SECRET)
    assert credentials.token == SECRET
    socket.create_connection((address.host, address.port)).close()
    listener.close()


def test_an_address_that_is_not_of_this_machine_cannot_be_listened_on() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.1:0: cannot assign requested address"):
        open_listener("192.0.2.1:0", SECRET)


def test_a_shared_token_is_made_once_and_readable_by_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    token = shared_token("a")
    assert shared_token("a") == token != shared_token("b")
    assert sorted(path.name for path in (tmp_path / "offbeat").iterdir()) == ["a", "b"]
    assert (tmp_path / "offbeat").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "offbeat" / "a").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("make", [lambda path: path.mkdir(0o755), Path.touch, lambda path: path.symlink_to("/")])
def test_a_place_for_tokens_that_others_could_have_made_is_refused(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    make(tmp_path / "offbeat")
    with pytest.raises(
        ConfigurationError, match=r"cannot be used \(it is not a directory that belongs to you alone\); remove it, or"
    ):
        shared_token("a")


@pytest.mark.parametrize("runtime", ["missing", "other", None])
def test_without_a_runtime_directory_of_this_user_the_token_is_in_the_temporary_one(
    runtime: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    if runtime is not None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / runtime))
    if runtime == "other":
        (tmp_path / runtime).mkdir()
        monkeypatch.setattr(os, "getuid", lambda: (tmp_path / "other").stat().st_uid + 1)
        with pytest.raises(ConfigurationError, match="it is not a directory that belongs to you alone"):
            shared_token("a")  # made by this process, which is now said to be another user
    else:
        shared_token("a")
    assert (tmp_path / f"offbeat-{os.getuid()}").is_dir()


def test_a_token_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    shared_token("a")
    monkeypatch.setattr(os, "open", full)
    with pytest.raises(ConfigurationError, match=r"offbeat, which cannot be used \(No space left on device\)"):
        shared_token("b")
