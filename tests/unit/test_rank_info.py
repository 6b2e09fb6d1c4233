"""Which rank a process is, by the environment variables of launchers."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from offbeat.errors import ConfigurationError
from offbeat.launch.listeners import open_listener
from offbeat.launch.rank_info import RankInfo, environment_of, first_host, read_rank_info, read_token
from offbeat.transports.rendezvous import Address

SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "123456", "SLURM_NNODES": "1"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("secret\n")
    path.chmod(0o600)
    return path


def test_without_a_launcher_a_process_is_alone() -> None:
    assert read_rank_info({"HOME": "/root"}) == RankInfo(0, 1, None, None, None, None, False, "alone")


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "host.example"])
def test_rank_info_is_passed_through_the_environment_unchanged(host: str, tmp_path: Path) -> None:
    given = RankInfo(2, 4, Address(host, 7700), b"\x00\xffsecret", None, tmp_path, True, "offbeat", "me")
    assert read_rank_info(environment_of(given)) == given
    again = dataclasses.replace(given, rank=0, incarnation=2, began=12345.678901234567)
    assert read_rank_info(environment_of(again)) == again


def test_variables_of_offbeat_precede_torchrun_and_torchrun_precedes_slurm() -> None:
    of_offbeat = environment_of(RankInfo(3, 5, Address("127.0.0.1", 1)))
    assert read_rank_info({**of_offbeat, **TORCHRUN, **SLURM}).launcher == "offbeat"
    alone = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}
    assert read_rank_info({**alone, **SLURM}) == RankInfo(0, 1, launcher="torchrun")
    assert read_rank_info(SLURM).launcher == "slurm"


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
        transport="gloo",
    )
    assert rank_info == RankInfo(0, 1, launcher="mpirun")
    assert rank_info.alone


def test_srun_uses_mpi_only_on_request() -> None:
    by_mpi = read_rank_info({**SLURM, "OFFBEAT_TRANSPORT": "mpi"})
    assert read_rank_info(SLURM, "mpi") == by_mpi == RankInfo(2, 4, launcher="slurm", transport="mpi")
    assert (
        read_rank_info({**SLURM, "OFFBEAT_TRANSPORT": "gloo"})
        == read_rank_info({**SLURM, "OFFBEAT_TRANSPORT": "auto"})
        == read_rank_info(SLURM)
    )
    assert read_rank_info({**SLURM, "PMI_RANK": "2", "PMI_SIZE": "4"}).transport == "gloo"


def test_a_listener_is_passed_by_its_file_descriptor() -> None:
    assert read_rank_info({"OFFBEAT_RANK": "0", "OFFBEAT_PROCESSES": "2", "OFFBEAT_LISTENER": "7"}).listener == 7


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"OFFBEAT_RANK": "x"}, "OFFBEAT_RANK is a whole number of at least 0, but it is 'x' here"),
        (
            {**OPEN_MPI, "OFFBEAT_TRANSPORT": "gloo"},
            "processes that mpirun starts are connected by MPI, not by gloo; start",
        ),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK is 4, but OMPI_COMM_WORLD_SIZE is 4"),
        ({"OFFBEAT_TRANSPORT": "mpx"}, "unknown transport 'mpx'; did you mean 'mpi'"),
        ({"OFFBEAT_RANK": "0"}, "OFFBEAT_PROCESSES is a whole number of at least 1, but it is '' here"),
        ({"OFFBEAT_RANK": "1", "OFFBEAT_PROCESSES": "2"}, "rank 1 does not know where rank 0 is; set OFFBEAT_ADDRESS"),
        ({"OFFBEAT_RANK": "0", "OFFBEAT_PROCESSES": "2", "OFFBEAT_TOKEN": "xy"}, "OFFBEAT_TOKEN does not hold"),
        (TORCHRUN, "torchrun started this run on several machines, .* needs a token; set OFFBEAT_TOKEN_FILE"),
        ({**TORCHRUN, "RANK": "4"}, "RANK is 4, but WORLD_SIZE is 4, and ranks count from 0"),
        ({**SLURM, "SLURM_NNODES": "2"}, "SLURM started this run on several machines, .* needs a token"),
    ],
)
def test_an_invalid_environment_is_answered_with_one_sentence(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        read_rank_info(environment)


# SLURM


def test_tasks_of_one_node_use_loopback_and_a_port_of_their_job() -> None:
    assert read_rank_info(SLURM) == RankInfo(2, 4, Address("127.0.0.1", 20_000 + 3456), launcher="slurm")


def test_tasks_of_several_nodes_use_the_first_one_and_a_token(token_file: Path) -> None:
    rank_info = read_rank_info(
        {**SLURM, "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[07-08]", "OFFBEAT_TOKEN_FILE": str(token_file)}
    )
    assert (rank_info.address, rank_info.token) == (Address("n07", 23_456), b"secret")


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
    assert hub.token == worker.token
    assert hub.token is not None
    assert len(hub.token) == 16
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
    assert next_hub.token == next_worker.token != hub.token
    assert next_hub.listener is not None
    socket.socket(fileno=next_hub.listener).close()


# Tokens and listeners


def test_a_token_is_the_stripped_content_of_its_file(token_file: Path) -> None:
    warnings: list[str] = []
    assert read_token(token_file, warnings.append) == b"secret"
    assert warnings == []
    token_file.chmod(0o644)
    assert read_token(token_file, warnings.append) == b"secret"
    assert warnings == [f"other users can read the token file {token_file}; type: chmod 600 {token_file}"]


def test_a_token_file_that_is_missing_or_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: no such file or directory; to make one type"):
        read_token(tmp_path / "none")
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(ConfigurationError, match="is empty; to make a token type"):
        read_token(tmp_path / "empty")


def test_a_listener_for_this_machine_has_a_random_token() -> None:
    listeners = [open_listener(None, None) for _ in range(2)]
    assert all(
        address == Address(*listener.getsockname()) and address.is_loopback for listener, address, _ in listeners
    )
    assert listeners[0][2] != listeners[1][2]
    for listener, _, _ in listeners:
        listener.close()


def test_a_listener_on_a_given_loopback_address_needs_no_token() -> None:
    listener, address, token = open_listener("127.0.0.1:0", None)
    assert (token, address.port) == (None, listener.getsockname()[1])
    with pytest.raises(ConfigurationError, match=f"port {address.port} of 127.0.0.1 is taken; choose another, or 0"):
        open_listener(str(address), None)
    listener.close()


def test_a_listener_for_other_machines_needs_a_token_and_is_reachable_from_this_one() -> None:
    with pytest.raises(ConfigurationError, match=r"0\.0\.0\.0:0 lets other machines in, which needs a token"):
        open_listener("0.0.0.0:0", None)
    listener, address, token = open_listener("0.0.0.0:0", b"secret")
    assert token == b"secret"
    socket.create_connection((address.host, address.port)).close()
    listener.close()


def test_an_address_that_is_not_of_this_machine_cannot_be_listened_on() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot listen on 192\.0\.2\.1:0: cannot assign requested address"):
        open_listener("192.0.2.1:0", b"secret")
