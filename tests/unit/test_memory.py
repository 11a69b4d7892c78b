from pathlib import Path

import pytest

from blocktrain.memory import FreeMemory, free_memory, is_out_of_memory

GB = 10**9


def machine(root: Path, available: int, cgroup: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:  {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def free(root: Path) -> int:
    found = free_memory(root)
    assert found
    return found.bytes


def test_without_a_container_what_the_machine_has_counts(tmp_path: Path):
    root = machine(tmp_path, 8 * 1024**3, "0::/user.slice\n")
    assert free_memory(root) == FreeMemory(8 * 1024**3, "this machine")
    group(root / "sys/fs/cgroup/user.slice", memory__max="max", memory__current=GB)
    assert free(root) == 8 * 1024**3


def test_the_tightest_cgroup_around_the_process_counts_without_its_cached_files(tmp_path: Path):
    root = machine(tmp_path, 64 * GB, "0::/pod/job\n")
    top = root / "sys/fs/cgroup"
    group(top / "pod", memory__max=4 * GB, memory__current=3 * GB)
    (top / "pod/memory.stat").write_text(f"anon 5\ninactive_file {GB}\n")
    group(top / "pod/job", memory__max=8 * GB, memory__current=GB)
    assert free_memory(root) == FreeMemory(2 * GB, "this container (cgroup)")
    group(top / "pod/job", memory__max=GB, memory__current=2 * GB)
    assert free(root) == 0


def test_a_namespace_hides_the_path_of_the_group(tmp_path: Path):
    """In a container, the group of /proc/self/cgroup may not exist: its files are at the top."""
    root = machine(tmp_path, 64 * GB, "0::/hidden/path\n")
    group(root / "sys/fs/cgroup", memory__max=3 * GB, memory__current=GB)
    assert free(root) == 2 * GB


def test_the_first_version_of_cgroups(tmp_path: Path):
    root = machine(tmp_path, 64 * GB, "5:cpu:/\n4:memory:/job\n0::/\n")
    job = root / "sys/fs/cgroup/memory/job"
    group(job, memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=GB)
    assert free(root) == 64 * GB // 1024 * 1024
    group(job, memory__limit_in_bytes=5 * GB)
    assert free(root) == 4 * GB


def test_a_system_that_says_nothing(tmp_path: Path):
    assert free_memory(tmp_path) is None


def test_this_machine_has_some():
    assert free(Path("/")) > 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_of_failed_allocations(error: Exception, expected: bool):
    assert is_out_of_memory(error) is expected
