from __future__ import annotations

import copy
import errno
import mmap
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from machine import HAS_CACHESTAT, MIB, FileSystem, needs_cachestat, observed

from pacedio import observe
from pacedio.observe import CacheStat, DirtyThresholds, cachestat, dirty_thresholds, limit_cap, meminfo, resident

PAGES = 64
PAGE = mmap.PAGESIZE


@pytest.fixture
def dirty_file(ext4: FileSystem) -> Path:
    """A new file of 64 pages, none of which is on the disk yet."""
    path = ext4.directory / "file"
    path.write_bytes(bytes([1]) * PAGES * PAGE)
    return path


def drop(path: Path) -> None:
    with open(path, "rb") as f:
        os.fdatasync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@needs_cachestat
def test_cachestat_counts_pages_as_they_go_from_dirty_to_clean_to_gone(dirty_file: Path) -> None:
    assert cachestat(dirty_file) == CacheStat(PAGES, PAGES, 0, 0, 0)
    with open(dirty_file, "rb") as f:
        os.fdatasync(f.fileno())
        assert cachestat(f.fileno()) == CacheStat(PAGES, 0, 0, 0, 0)
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert cachestat(os.fsencode(dirty_file)).cached == 0


@needs_cachestat
def test_cachestat_of_a_range(dirty_file: Path) -> None:
    drop(dirty_file)
    with open(dirty_file, "r+b") as f:
        f.write(bytes(8 * PAGE))
    assert cachestat(dirty_file).dirty == 8
    assert cachestat(str(dirty_file), 6 * PAGE).dirty == 2
    assert cachestat(str(dirty_file), 6 * PAGE, PAGE) == CacheStat(1, 1, 0, 0, 0)


def test_cachestat_agrees_with_the_observer(dirty_file: Path) -> None:
    with observed(dirty_file) as seen:
        time.sleep(0.1)
        drop(dirty_file)
        time.sleep(0.1)
    assert seen["most"] == seen["most_cached"] == PAGES * PAGE
    assert seen["samples"] > 50


@needs_cachestat
def test_overlayfs_has_pages_only_for_resident(overlayfs: FileSystem) -> None:
    path = overlayfs.directory / "file"
    path.write_bytes(bytes(PAGES * PAGE))
    assert cachestat(path) == CacheStat(0, 0, 0, 0, 0)
    assert resident(path) == PAGES
    assert cachestat(overlayfs.pages(path)).dirty == PAGES


def test_resident_counts_what_is_cached(dirty_file: Path) -> None:
    assert resident(dirty_file) == PAGES
    drop(dirty_file)
    assert resident(str(dirty_file)) == 0
    with open(dirty_file, "rb", buffering=0) as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing read ahead
        os.pread(f.fileno(), 1, 3 * PAGE)
        assert resident(f.fileno()) == 1


@needs_cachestat
def test_resident_agrees_with_cachestat(dirty_file: Path) -> None:
    drop(dirty_file)
    with open(dirty_file, "r+b", buffering=0) as f:
        os.pwrite(f.fileno(), bytes(PAGE), 3 * PAGE)
        assert resident(f.fileno()) == cachestat(f.fileno()).cached == 1


def test_resident_of_an_empty_file_and_of_a_hole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert resident(path) == 0
    os.truncate(path, (1 << 30) + 1)
    assert resident(path) == 0


@pytest.mark.parametrize("look", [cachestat, resident])
def test_a_missing_file_is_named(look: Callable[[object], object], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as e:
        look(tmp_path / "missing")
    assert os.fspath(e.value.filename) == str(tmp_path / "missing")


@pytest.mark.parametrize("look", [pytest.param(cachestat, marks=needs_cachestat), resident])
def test_a_closed_descriptor(look: Callable[[object], object]) -> None:
    with pytest.raises(OSError) as e:  # noqa: PT011
        look(987654)
    assert e.value.errno == errno.EBADF
    if look is cachestat:
        assert e.value.filename == 987654


def test_no_descriptor_is_left_open(dirty_file: Path) -> None:
    before = os.listdir("/proc/self/fd")
    if HAS_CACHESTAT:
        cachestat(dirty_file)
    resident(dirty_file)
    with pytest.raises(OSError):  # noqa: PT011
        resident(dirty_file.parent)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.skipif(HAS_CACHESTAT, reason="this kernel has cachestat")
def test_an_older_kernel_has_no_cachestat(dirty_file: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=str(dirty_file)) as e:
        cachestat(dirty_file)
    assert e.value.errno == errno.ENOSYS
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(("offset", "length"), [(-1, 0), (0, -1)])
def test_a_negative_range_is_refused(offset: int, length: int) -> None:
    with pytest.raises(ValueError, match="-1"):
        cachestat(0, offset, length)


def test_meminfo_is_in_bytes() -> None:
    found = meminfo()
    total = os.sysconf("SC_PHYS_PAGES") * PAGE
    assert 0.9 * total <= found["MemTotal"] <= 1.1 * total
    assert {"Dirty", "Writeback", "Cached", "MemFree"} <= found.keys()
    assert "HugePages_Total" not in found


def test_meminfo_sees_dirty_pages(ext4: FileSystem) -> None:
    before = meminfo()["Dirty"]
    with open(ext4.directory / "file", "wb") as f:
        f.write(bytes(64 << 20))
        f.flush()
        after = meminfo()["Dirty"]
        f.truncate(0)
    # Others may write out pages of their own meanwhile, but hardly this many.
    assert after - before > 32 << 20


def test_a_cachestat_is_a_frozen_value() -> None:
    one = CacheStat(1, 2, 3, 4, 5)
    assert repr(one) == "CacheStat(cached=1, dirty=2, writeback=3, evicted=4, recently_evicted=5)"
    assert one == CacheStat(1, 2, 3, 4, 5) == pickle.loads(pickle.dumps(one)) == copy.copy(one)
    assert hash(one) == hash(CacheStat(1, 2, 3, 4, 5))
    assert one != CacheStat(1, 2, 3, 4, 6)
    assert one != (1, 2, 3, 4, 5)
    with pytest.raises(AttributeError, match="dirty"):
        one.dirty = 7
    with pytest.raises(AttributeError, match="dirty"):
        del one.dirty
    with pytest.raises(AttributeError):
        one.clean = 7  # type: ignore[attr-defined]


# Trees of files like the kernel's. Theirs is a machine of 1,000,000 dirtyable pages:
#   free 500,000 + active 240,000 + inactive 300,000 + 1 - reserve 40,001,
#   of the reserve DMA: its 16 + 24,090 are more than it has, so 3,840; Normal: 36,561 - 400 + 0 = 36,161.
# Ratios are in 1/4096 of it: 10 % are 409, 20 % are 819.
#   background 409 * 1,000,000 / 4096 = 99,853; dirty 819 * 1,000,000 / 4096 = 199,951

Tree = dict[str, str | None]

ZONEINFO = """\
Node 0, zone      DMA
  per-node stats
      nr_inactive_anon 253234
  pages free     3840
        boost    0
        min      10
        high     16
        managed  3840
        protection: (0, 3018, 24090, 24090, 24090)
  pagesets
    cpu: 0
              count:    0
              high:     5000
Node 0, zone   Normal
  pages free     496160
        boost    400
        min      30000
        high     36561
        managed  5394266
        protection: (0, 0, 0, 0, 0)
Node 0, zone  Movable
  pages free     0
        boost    0
        high     32
        managed  0
        protection: (0, 0, 0, 0, 0)
"""
COUNTS = """\
nr_zone_inactive_file 7
nr_inactive_file 300000
nr_active_file 240000
nr_dirty 10000
nr_writeback 5000
"""
MACHINE: Tree = {
    "proc/vmstat": COUNTS + "nr_dirty_threshold 199951\nnr_dirty_background_threshold 99853\npgpgin 12\n",
    "proc/meminfo": "MemTotal:        8000000 kB\nMemFree:         2000000 kB\nMemAvailable:    4000000 kB\n",
    "proc/zoneinfo": ZONEINFO,
    "proc/sys/vm/dirty_ratio": "20\n",
    "proc/sys/vm/dirty_background_ratio": "10\n",
    "proc/sys/vm/dirty_bytes": "0\n",
    "proc/sys/vm/dirty_background_bytes": "0\n",
}
OF_THE_MACHINE = DirtyThresholds(99853 * 4096, 199951 * 4096, 1000000 * 4096, "machine")

# What a cgroup of 256 MiB that uses 128 MiB says, of which 100 MiB are a file's, 5 MiB of these not clean.
V1_STAT = """\
cache 1
active_file 4096
inactive_file 8192
total_dirty 4194304
total_writeback 1048576
total_inactive_file 62914560
total_active_file 41943040
"""
V2_STAT = """\
anon 12288
file 104857600
file_dirty 4194304
file_writeback 1048576
inactive_file 62914560
active_file 41943040
"""
# Cached 25,600 pages, headroom 65,536 - 32,768, both far below the machine's; together 58,368:
#   background 409 * 58,368 / 4096 = 5,828; dirty 819 * 58,368 / 4096 = 11,670
LIMITED = (5828 * 4096, 11670 * 4096, 58368 * 4096)


def v1(directory: str, limit: int | str = 256 * MIB, usage: int = 128 * MIB, hierarchy: int = 1) -> Tree:
    return {
        f"{directory}/memory.limit_in_bytes": f"{limit}\n",
        f"{directory}/memory.usage_in_bytes": f"{usage}\n",
        f"{directory}/memory.use_hierarchy": f"{hierarchy}\n",
        f"{directory}/memory.stat": V1_STAT,
    }


def v2(directory: str, limit: int | str = 256 * MIB, usage: int = 128 * MIB, high: int | str = "max") -> Tree:
    return {
        f"{directory}/memory.max": f"{limit}\n",
        f"{directory}/memory.high": f"{high}\n",
        f"{directory}/memory.current": f"{usage}\n",
        f"{directory}/memory.stat": V2_STAT,
    }


UNLIMITED = 9223372036854771712
V1_MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/root rw
32 22 0:29 / /sys/fs/cgroup/cpu rw,relatime shared:4 - cgroup cgroup rw,cpu
35 22 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 master:2 - cgroup cgroup rw,memory
"""
V1_HOST: Tree = {
    "proc/self/cgroup": "5:cpu:/wrong\n4:hugetlb,memory:/jobs/copy\n1:name=systemd:/wrong\n0::/wrong\n",
    "proc/self/mountinfo": V1_MOUNTS,
    **v1("sys/fs/cgroup/memory/jobs/copy"),
    **v1("sys/fs/cgroup/memory/jobs", UNLIMITED, 999 * MIB),
    **v1("sys/fs/cgroup/memory", UNLIMITED, 4096 * MIB),
}
V1_CONTAINER: Tree = {  # its own cgroup is mounted there, and the path is the host's
    "proc/self/cgroup": "4:memory:/docker/abc\n",
    "proc/self/mountinfo": (
        "50 40 0:32 /docker/abc /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory\n"
        "51 40 0:32 /docker/abcdef /mnt/wrong ro,nosuid - cgroup cgroup rw,memory\n"
    ),
    **v1("sys/fs/cgroup/memory"),
    **v1("mnt/wrong", 1 * MIB, 0),
}
V2_MOUNTS = "29 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V2_HOST: Tree = {
    "proc/self/cgroup": "0::/user.slice/session.scope\n",
    "proc/self/mountinfo": V2_MOUNTS,
    **v2("sys/fs/cgroup/user.slice/session.scope"),
    **v2("sys/fs/cgroup/user.slice", "max", 999 * MIB),
    "sys/fs/cgroup/memory.stat": V2_STAT,  # the root has no limit, and no files for one
}
V2_NAMESPACE: Tree = {  # its own cgroup is the root, and has a limit all the same
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": "60 50 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n",
    **v2("sys/fs/cgroup"),
}
V2_CONTAINER: Tree = {
    **V2_NAMESPACE,
    "proc/self/cgroup": "0::/docker/abc\n",
    "proc/self/mountinfo": "60 50 0:26 /docker/abc /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n",
}
HYBRID: Tree = {
    **V1_HOST,
    "proc/self/mountinfo": V1_MOUNTS + "41 22 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    **v2("sys/fs/cgroup/unified/wrong", 1 * MIB, 0),
}
OUTSIDE: Tree = {  # a cgroup namespace that the process is not in, but with the host's mount
    "proc/self/cgroup": "0::/../jobs\n",
    "proc/self/mountinfo": V2_MOUNTS.replace(" / ", " /.. ", 1),
    **v2("sys/fs/cgroup/jobs"),
}
ESCAPED: Tree = {
    "proc/self/cgroup": "0::/two words/tab\tbackslash\\\n",
    "proc/self/mountinfo": ("29 22 0:26 /two\\040words /my\\040cgroups\\134 rw,nosuid - cgroup2 none rw\n"),
    **v2("my cgroups\\/tab\tbackslash\\"),
}

recorded = pytest.mark.skipif(PAGE != 4096, reason="the recorded trees are of a machine with pages of 4096 bytes")


def plant(root: Path, *trees: Tree) -> str:
    """Write files; None takes one away that an earlier tree had."""
    for name, text in [item for tree in trees for item in tree.items()]:
        path = root / name
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return str(root)


@recorded
@pytest.mark.parametrize(
    ("tree", "source"),
    [
        pytest.param(V1_HOST, "/jobs/copy", id="v1-host"),
        pytest.param(V1_CONTAINER, "/docker/abc", id="v1-container"),
        pytest.param(V2_HOST, "/user.slice/session.scope", id="v2-host"),
        pytest.param(V2_NAMESPACE, "/", id="v2-namespace"),
        pytest.param(V2_CONTAINER, "/docker/abc", id="v2-container"),
        pytest.param(HYBRID, "/jobs/copy", id="hybrid"),
        pytest.param(OUTSIDE, "/../jobs", id="outside-of-the-namespace"),
        pytest.param(ESCAPED, "/two words/tab\tbackslash\\", id="escaped"),
    ],
)
def test_thresholds_of_a_cgroup(tree: Tree, source: str, tmp_path: Path) -> None:
    found = dirty_thresholds(root=plant(tmp_path, MACHINE, tree))
    assert found == DirtyThresholds(*LIMITED, source)
    assert found.freerun == 8749 * 4096


@recorded
@pytest.mark.parametrize(
    "trees",
    [
        pytest.param([], id="no-cgroups"),
        pytest.param([V1_HOST, v1("sys/fs/cgroup/memory/jobs/copy", UNLIMITED)], id="v1-unlimited"),
        pytest.param([V2_HOST, v2("sys/fs/cgroup/user.slice/session.scope", "max")], id="v2-unlimited"),
        pytest.param([V2_HOST, {"proc/self/cgroup": "3:cpu:/a\n1:name=systemd:/\n"}], id="no-memory-controller"),
        pytest.param([{"proc/self/cgroup": "0::/a\n", "proc/self/mountinfo": V2_MOUNTS}], id="v2-without-memory"),
        pytest.param([V2_HOST, {"proc/self/mountinfo": V1_MOUNTS}], id="not-mounted"),
        pytest.param([V2_NAMESPACE, {"proc/self/cgroup": "0::/../elsewhere\n"}, v2("sys/fs/elsewhere")], id="outside"),
        # The host's mount in the namespace of /jobs, and nothing says that this is its name.
        pytest.param([OUTSIDE, {"proc/self/cgroup": "0::/\n"}], id="nameless"),
        pytest.param([V1_CONTAINER, {"proc/self/cgroup": "4:memory:/docker/abcd\n"}], id="another-container"),
        pytest.param([V1_HOST, {"sys/fs/cgroup/memory/jobs/copy/memory.limit_in_bytes": None}], id="v1-no-limit"),
        pytest.param([V1_HOST, {"sys/fs/cgroup/memory/jobs/copy/memory.usage_in_bytes": None}], id="v1-no-usage"),
        pytest.param([V1_HOST, {"sys/fs/cgroup/memory/jobs/copy/memory.stat": None}], id="v1-no-stat"),
        pytest.param([V2_HOST, {"sys/fs/cgroup/user.slice/session.scope/memory.max": None}], id="v2-no-limit"),
        pytest.param([V2_HOST, {"proc/self/cgroup": None}], id="no-membership"),
        pytest.param([V2_HOST, {"proc/self/mountinfo": None}], id="no-mountinfo"),
    ],
)
def test_without_a_limit_they_are_the_machines(trees: list[Tree], tmp_path: Path) -> None:
    assert dirty_thresholds(root=plant(tmp_path, MACHINE, *trees)) == OF_THE_MACHINE


@recorded
@pytest.mark.parametrize(
    ("trees", "expected"),
    [
        # The parent has 4,096 pages left: 25,600 + 4,096 = 29,696; 409 of 4096 are 2,965, and 819 are 5,937.
        pytest.param(
            [V2_HOST, v2("sys/fs/cgroup/user.slice", 512 * MIB, 496 * MIB)],
            (2965, 5937, 29696),
            id="v2-parent",
        ),
        pytest.param(
            [
                V2_HOST,
                v2("sys/fs/cgroup/user.slice/session.scope", "max"),
                v2("sys/fs/cgroup/user.slice", 512 * MIB, 496 * MIB),
            ],
            (2965, 5937, 29696),
            id="v2-only-the-parent",
        ),
        pytest.param(
            [V2_HOST, v2("sys/fs/cgroup/user.slice", 900 * MIB, 496 * MIB, high=512 * MIB)],
            (2965, 5937, 29696),
            id="v2-high",
        ),
        pytest.param(
            [V1_HOST, v1("sys/fs/cgroup/memory/jobs", 512 * MIB, 496 * MIB)], (2965, 5937, 29696), id="v1-parent"
        ),
        pytest.param(
            [V1_HOST, v1("sys/fs/cgroup/memory/jobs", 512 * MIB, 496 * MIB, hierarchy=0)],
            (5828, 11670, 58368),
            id="v1-parent-does-not-count",
        ),
        # Nothing left, which is what a cgroup full of cached pages looks like: 25,600.
        pytest.param(
            [V2_HOST, v2("sys/fs/cgroup/user.slice", 512 * MIB, 513 * MIB)], (2556, 5118, 25600), id="v2-full"
        ),
        # The controller ends above: the process belongs to the parent, with its file pages.
        pytest.param(
            [V2_HOST, {"proc/self/cgroup": "0::/user.slice/session.scope/inner\n"}],
            (5828, 11670, 58368),
            id="v2-inner",
        ),
        # 8 GiB, of which the machine has but 1,000,000 - 15,000 - (25,600 - 1,280) = 960,680 others: 986,280 in all.
        pytest.param(
            [V2_HOST, v2("sys/fs/cgroup/user.slice/session.scope", 8192 * MIB)],
            (98483, 197207, 986280),
            id="v2-more-than-the-machine-has",
        ),
        # 1 GiB is 1,074 bytes for each of the machine's pages, and so for each of the cgroup's.
        pytest.param(
            [V2_HOST, {"proc/sys/vm/dirty_bytes": f"{1024 * MIB}\n", "proc/sys/vm/dirty_ratio": "0\n"}],
            (5828, 15304, 58368),
            id="dirty_bytes",
        ),
        pytest.param(
            [V2_HOST, {"proc/sys/vm/dirty_background_bytes": f"{512 * MIB}\n"}],
            (7652, 11670, 58368),
            id="dirty_background_bytes",
        ),
        # 269: fewer than the background's 409, so that this becomes half of it.
        pytest.param(
            [V2_HOST, {"proc/sys/vm/dirty_bytes": f"{256 * MIB}\n"}],
            (1916, 3833, 58368),
            id="dirty_bytes-below-background",
        ),
        pytest.param(  # never more than all: 4096
            [V2_HOST, {"proc/sys/vm/dirty_bytes": f"{1 << 40}\n"}],
            (5828, 58368, 58368),
            id="dirty_bytes-of-more-than-all",
        ),
    ],
)
def test_what_counts_in_a_cgroup(trees: list[Tree], expected: tuple[int, int, int], tmp_path: Path) -> None:
    found = dirty_thresholds(root=plant(tmp_path, MACHINE, *trees))
    assert (found.background // 4096, found.dirty // 4096, found.dirtyable // 4096) == expected
    assert found.source != "machine"


@recorded
def test_the_machine_decides_where_its_background_threshold_is_lower(tmp_path: Path) -> None:
    # Ratios are rounded up: 1 MiB is 2 bytes for each page, and 2 * 986,280 / 4096 = 481 pages in this cgroup.
    few = COUNTS + "nr_dirty_threshold 199951\nnr_dirty_background_threshold 256\n"
    tree: Tree = {"proc/vmstat": few, "proc/sys/vm/dirty_background_bytes": f"{MIB}\n"}
    large = v2("sys/fs/cgroup/user.slice/session.scope", 8192 * MIB)
    found = dirty_thresholds(root=plant(tmp_path, MACHINE, V2_HOST, tree, large))
    assert found == DirtyThresholds(256 * 4096, 199951 * 4096, 1000000 * 4096, "machine")


@recorded
def test_a_mount_that_shows_more_ancestors_is_preferred(tmp_path: Path) -> None:
    whole = V1_MOUNTS.replace("/sys/fs/cgroup/memory", "/whole")
    part = V1_MOUNTS.replace("0:32 / /sys", "0:32 /jobs/copy /sys")
    files = {**v1("whole/jobs/copy"), **v1("whole/jobs", 512 * MIB, 496 * MIB)}
    for number, mounts in enumerate((whole + part, part + whole)):
        root = plant(tmp_path / str(number), MACHINE, V1_HOST, v1("sys/fs/cgroup/memory"), files)
        plant(tmp_path / str(number), {"proc/self/mountinfo": mounts})
        assert dirty_thresholds(root=root) == DirtyThresholds(2965 * 4096, 5937 * 4096, 29696 * 4096, "/jobs/copy")


@recorded
@pytest.mark.parametrize(
    ("settings", "background", "dirty"),
    [
        ({}, 99853, 199951),
        ({"dirty_bytes": "1073741825"}, 99853, 262145),
        ({"dirty_background_bytes": "1048576"}, 256, 199951),
        ({"dirty_bytes": "8192"}, 1, 2),
        ({"dirty_bytes": "8192", "dirty_background_bytes": "8192"}, 1, 2),
    ],
)
def test_an_old_kernel_does_not_tell_its_thresholds(
    settings: dict[str, str], background: int, dirty: int, tmp_path: Path
) -> None:
    tree: Tree = {f"proc/sys/vm/{name}": value for name, value in settings.items()}
    found = dirty_thresholds(root=plant(tmp_path, MACHINE, {"proc/vmstat": COUNTS}, tree))
    assert found == DirtyThresholds(background * 4096, dirty * 4096, 1000000 * 4096, "machine")


@recorded
def test_the_reserve_is_left_out_where_nobody_tells_it(tmp_path: Path) -> None:
    found = dirty_thresholds(root=plant(tmp_path, MACHINE, {"proc/zoneinfo": None}))
    assert found.dirtyable == 1040001 * 4096


def test_a_reserve_larger_than_what_is_free(tmp_path: Path) -> None:
    few: Tree = {"proc/meminfo": "MemTotal: 8000000 kB\nMemFree: 160000 kB\n"}
    assert dirty_thresholds(root=plant(tmp_path, MACHINE, few)).dirtyable == 540001 * PAGE


@pytest.mark.parametrize("missing", ["proc/vmstat", "proc/sys/vm/dirty_background_bytes", "proc/sys/vm/dirty_ratio"])
def test_what_proc_does_not_tell_is_named(missing: str, tmp_path: Path) -> None:
    root = plant(tmp_path, MACHINE, V2_HOST, {missing: None})
    with pytest.raises(FileNotFoundError) as e:
        dirty_thresholds(root=root)
    assert e.value.filename == f"{root}/{missing}"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Directories, which open but cannot be read, since nothing is forbidden to root."""
    root = plant(tmp_path, MACHINE, V1_HOST)
    limit = tmp_path / "sys/fs/cgroup/memory/jobs/copy/memory.limit_in_bytes"
    limit.unlink()
    limit.mkdir()
    before = os.listdir("/proc/self/fd")
    assert dirty_thresholds(root=root).source == "machine"
    (tmp_path / "proc/vmstat").unlink()
    (tmp_path / "proc/vmstat").mkdir()
    with pytest.raises(IsADirectoryError) as e:
        dirty_thresholds(root=root)
    assert e.value.filename == f"{root}/proc/vmstat"
    assert os.listdir("/proc/self/fd") == before


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """limit_cap() as it is in a new process at this time of the clock, with the files of `tmp_path`."""
    now = [1000.0]
    monkeypatch.setattr(observe, "monotonic", lambda: now[0])
    monkeypatch.setattr(observe, "_here", observe._Source(str(tmp_path)))
    monkeypatch.setattr(observe, "_cap", (0.0, None))
    return now


@recorded
def test_limit_cap_is_a_quarter_of_the_background_threshold(clock: list[float], tmp_path: Path) -> None:
    plant(tmp_path, MACHINE, V2_HOST)
    assert limit_cap() == 5828 // 4 * 4096
    # Nothing is left, and for a second nobody looks.
    plant(tmp_path, v2("sys/fs/cgroup/user.slice/session.scope", 4096, 128 * MIB))
    plant(tmp_path, {"sys/fs/cgroup/user.slice/session.scope/memory.stat": "active_file 0\n"})
    clock[0] += 0.999
    assert limit_cap() == 5828 // 4 * 4096
    clock[0] += 0.001
    assert limit_cap() == 4096
    # Moved elsewhere.
    plant(tmp_path, {"proc/self/cgroup": "0::/\n"})
    clock[0] += 1
    assert limit_cap() == 99853 // 4 * 4096


def test_limit_cap_where_nothing_can_be_read(clock: list[float], tmp_path: Path) -> None:
    assert limit_cap() is None
    plant(tmp_path, MACHINE)
    clock[0] += 0.5
    assert limit_cap() is None
    clock[0] += 0.5
    assert limit_cap() == 99853 // 4 * PAGE


def from_the_kernel(path: str, name: str) -> int:
    return next(int(line.split()[1]) for line in Path(path).read_text().splitlines() if line.split()[0] == name)


def machine_dirtyable() -> int:
    """By way of the kernel's own threshold. Skips where that is not a part of it."""
    ratio = int(Path("/proc/sys/vm/dirty_ratio").read_text())
    if not ratio or int(Path("/proc/sys/vm/dirty_background_ratio").read_text()) >= ratio:
        pytest.skip("vm.dirty_bytes is set on this machine")
    return from_the_kernel("/proc/vmstat", "nr_dirty_threshold") * PAGE * 100 // ratio


def test_thresholds_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    for name in ("vmstat", "meminfo", "zoneinfo", "sys"):
        (tmp_path / "proc" / name).symlink_to(f"/proc/{name}")
    found = dirty_thresholds(root=str(tmp_path))  # without its cgroups
    assert found.source == "machine"
    assert found.dirty == pytest.approx(from_the_kernel("/proc/vmstat", "nr_dirty_threshold") * PAGE, rel=0.02)
    background = from_the_kernel("/proc/vmstat", "nr_dirty_background_threshold") * PAGE
    assert found.background == pytest.approx(background, rel=0.02)
    assert found.dirtyable == pytest.approx(machine_dirtyable(), rel=0.02)
    # Without the kernel's own numbers, by the same rules.
    (tmp_path / "proc/vmstat").unlink()
    lines = Path("/proc/vmstat").read_text().splitlines(keepends=True)
    (tmp_path / "proc/vmstat").write_text("".join(line for line in lines if "_threshold" not in line))
    computed = dirty_thresholds(root=str(tmp_path))
    assert (computed.background, computed.dirty) == pytest.approx((found.background, found.dirty), rel=0.02)


def test_here_a_limit_cap_is_known() -> None:
    found = limit_cap()
    assert found is not None
    assert found % PAGE == 0
    assert found == pytest.approx(dirty_thresholds().background / 4, rel=0.1)


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A cgroup v1 of 256 MiB on this machine."""
    options = ("-n", "-f", "-t", "cgroup", "-O", "memory", "-o", "TARGET")
    mount = subprocess.run(["findmnt", *options], capture_output=True, text=True, check=False).stdout.strip()
    if os.geteuid() != 0 or not mount:
        pytest.skip("needs root and a memory cgroup of v1")
    directory = Path(mount) / f"pacedio-test.{os.getpid()}"
    directory.mkdir()
    try:
        (directory / "memory.limit_in_bytes").write_text(str(256 * MIB))
        yield directory
    finally:
        directory.rmdir()


def test_thresholds_of_a_real_cgroup(memory_cgroup: Path, ext4: FileSystem) -> None:
    code = """
import os, sys, time
from pathlib import Path
from pacedio import observe

def show(found):
    print(found.source, found.background, found.dirty, found.dirtyable)

show(observe._here.read())
cgroup = Path(sys.argv[1])
(cgroup / "cgroup.procs").write_text(str(os.getpid()))
show(observe._here.read())
with open(sys.argv[2], "wb") as f:
    f.write(bytes(64 << 20))
    os.fdatasync(f.fileno())
usage = int((cgroup / "memory.usage_in_bytes").read_text())
stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
show(observe._here.read())
print(usage, int(stat["active_file"]) + int(stat["inactive_file"]))
"""
    arguments = [sys.executable, "-c", code, str(memory_cgroup), str(ext4.directory / "file")]
    lines = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.splitlines()
    before, moved, filled, by_hand = (line.split() for line in lines)
    assert before[0] != f"/{memory_cgroup.name}"
    assert moved[0] == filled[0] == f"/{memory_cgroup.name}"
    usage, cached = map(int, by_hand)
    assert cached >= 60 * MIB
    # Of 256 MiB, all but what is used otherwise.
    dirtyable = cached + 256 * MIB - usage
    assert int(filled[3]) == pytest.approx(dirtyable, rel=0.02)
    machine = machine_dirtyable()
    for line, name in ((1, "nr_dirty_background_threshold"), (2, "nr_dirty_threshold")):
        expected = dirtyable * from_the_kernel("/proc/vmstat", name) * PAGE / machine
        assert int(filled[line]) == pytest.approx(expected, rel=0.02)


def test_dirty_thresholds_are_a_frozen_value() -> None:
    one = DirtyThresholds(10, 21, 100, "/a")
    assert repr(one) == "DirtyThresholds(background=10, dirty=21, dirtyable=100, source='/a')"
    assert one == pickle.loads(pickle.dumps(one)) == copy.copy(one)
    assert hash(one) == hash(DirtyThresholds(10, 21, 100, "/a"))
    assert one != DirtyThresholds(10, 21, 100, "machine")
    assert one != CacheStat(10, 21, 100, 0, 0)
    assert one.freerun == 15
    with pytest.raises(AttributeError, match="freerun"):
        one.freerun = 7  # type: ignore[misc]
    with pytest.raises(AttributeError, match="source"):
        del one.source
