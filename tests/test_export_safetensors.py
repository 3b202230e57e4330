"""Float folders: what is read, and what of a stranger's folder is refused, in one line."""

import errno
import json
import os
import resource
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from export import FORMATS
from export.checkpoint import Checkpoint, kind, read
from export.errors import ArtifactError
from export.safetensors import HEADER_LIMIT, TYPES, read_file, read_header, read_tensors, write_file

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
WEIGHTS = {
    "a.weight": np.arange(40, dtype=np.float32).reshape(5, 8),
    "b.bias": np.arange(3).astype(ml_dtypes.bfloat16),
    "c.scalar": np.array(2.5, np.float32),
    "d.empty": np.zeros((0, 4), np.float32),
    "e.ids": np.arange(4),
}


def write(folder, weights=WEIGHTS, **options) -> None:
    FORMATS["safetensors"].write(Checkpoint(CONFIG, weights), folder, **options)


def craft(path, header, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(begin: int, end: int, dtype: str = "U8", shape=None) -> dict:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("limit", [10**9, 100, 1])
def test_a_folder_is_read_as_it_was_written_in_one_file_or_many(dtype, limit, tmp_path):
    write(tmp_path, dtype=dtype, shard_limit=limit)
    again = read(tmp_path)
    assert again.config == {**CONFIG, "dtype": dtype, "torch_dtype": dtype}
    assert again.weights.keys() == WEIGHTS.keys()
    for name, value in WEIGHTS.items():
        found = again.weights[name]
        assert found.dtype.name == ("int64" if name == "e.ids" else dtype)
        assert found.shape == value.shape
        assert np.array_equal(found.astype(np.float64), value.astype(np.float64))
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == {10**9: 1, 100: 3 if dtype == "float32" else 2, 1: 5}[limit] or len(files) > 1
    largest = max(value.nbytes for value in WEIGHTS.values())
    assert all(sum(e.end - e.begin for e in read_header(file).values()) <= max(limit, largest) for file in files)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=20), st.tuples(st.sampled_from(sorted(TYPES)), st.integers(0, 9))))
def test_the_librarys_files_are_read_alike(tmp_path_factory, shapes):
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    tensors = {n: np.arange(k).astype(TYPES[t]).reshape(1, k) for n, (t, k) in shapes.items() if n != "__metadata__"}
    write_file(tensors, path)
    found = read_file(path.parent, path.name)
    assert found.keys() == tensors.keys()
    assert all(found[n].dtype == v.dtype and found[n].tobytes() == v.tobytes() for n, v in tensors.items())


def test_a_tensor_is_read_when_it_is_asked_for(tmp_path):
    write(tmp_path, dtype="float32")
    weights = read(tmp_path).weights
    mapped = weights["a.weight"]
    assert not mapped.flags.owndata
    assert not mapped.flags.writeable
    os.truncate(tmp_path / "model.safetensors", 16)
    with pytest.raises(ArtifactError, match="became shorter"):
        weights["a.weight"]


def test_numbers_at_odd_offsets_are_read(tmp_path):
    header = {"a": entry(0, 1), "b": entry(1, 9, "F32", [2])}
    craft(tmp_path / "x.safetensors", header, b"\7" + np.array([1.5, -2], "<f4").tobytes())
    assert read_file(tmp_path, "x.safetensors")["b"].tolist() == [1.5, -2]


BYTES = st.binary(max_size=40)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 40) | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
OFFSETS = st.lists(st.integers(-1, 40) | JUNK, min_size=1, max_size=3) | JUNK
NEARLY = st.fixed_dictionaries(
    {"dtype": st.sampled_from([*TYPES, "F4", "f32"]) | JUNK, "shape": OFFSETS, "data_offsets": OFFSETS},
    optional={"more": JUNK},
)
HEADERS = st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), NEARLY | JUNK, max_size=3)


@settings(max_examples=300, deadline=None)
@given(header=st.one_of(HEADERS, JUNK, BYTES), data=BYTES, length=st.none() | st.integers(0, 2**64 - 1))
@example(header=b"[" * 100_000, data=b"", length=None)
@example(header=b'{"a": ' + b"9" * 5000 + b"}", data=b"", length=None)
@example(header=b"{}", data=b"", length=2**64 - 1)
@example(header={"a": entry(0, 4, "F32", [2**62, 2**62])}, data=b"1234", length=None)
@example(header={"a": entry(0, 0, "F32", [0, 2**62])}, data=b"", length=None)
def test_whatever_the_header_only_an_artifact_error_escapes(tmp_path_factory, header, data, length):
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    craft(path, header, data, length)
    refusal, tensors = "", {}
    try:
        tensors = read_file(path.parent, path.name)
    except ArtifactError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert all(tensors[name].nbytes <= len(data) for name in tensors)


CROOKED = {
    "truncated: a ends at byte": ({"a": entry(0, 9)}, b"12345678"),
    "overlap": ({"a": entry(0, 6), "b": entry(4, 8)}, b"12345678"),
    "leave a hole": ({"a": entry(0, 3), "b": entry(4, 8)}, b"12345678"),
    "belong to no tensor": ({"a": entry(0, 4)}, b"12345678"),
    "dtype 'F4'": ({"a": entry(0, 8, "F4", [16])}, b"12345678"),
    "8 bytes, but F32": ({"a": entry(0, 8, "F32", [3])}, b"12345678"),
    "none negative": ({"a": entry(0, 8, "U8", [-2, -4])}, b"12345678"),
    "at most 8 integers": ({"a": entry(0, 1, "U8", [1] * 9)}, b"1"),
    "data_offsets must be": ({"a": entry(8, 0, "U8", [8])}, b"12345678"),
    "exactly dtype, shape": ({"a": {"dtype": "U8"}}, b""),
    "'a' stands there twice": (b'{"a": 1, "a": 2}', b""),
    "not valid JSON": (b"{", b""),
    "a JSON object is wanted": (b"[]", b""),
    "__metadata__": ({"__metadata__": {"x": 1}}, b""),
}


@pytest.mark.parametrize("message", CROOKED)
def test_a_crooked_file_is_refused_by_what_is_wrong_with_it(message, tmp_path):
    craft(tmp_path / "model.safetensors", *CROOKED[message])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=message) as caught:
        read(tmp_path)
    assert "model.safetensors" in str(caught.value)


def test_a_header_beyond_the_limit_is_not_read(tmp_path):
    path = tmp_path / "x.safetensors"
    craft(path, b"{}", length=HEADER_LIMIT + 1)
    os.truncate(path, HEADER_LIMIT + 100)  # sparse
    with pytest.raises(ArtifactError, match="at most 100000000 are read"):
        read_header(path)


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_a_truncated_file_is_refused(cut, tmp_path):
    write(tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, cut % file.stat().st_size)
    with pytest.raises(ArtifactError, match="truncated"):
        read(tmp_path)


def reindex(folder, change) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["../stolen.safetensors", "/etc/passwd", "..", "sub/x.safetensors", "a\\b", "x\0", ""])
def test_an_index_may_not_name_a_file_elsewhere(name, tmp_path):
    folder = tmp_path / "model"
    write(folder, shard_limit=50)
    safetensors.numpy.save_file({"a.weight": np.zeros(1)}, tmp_path / "stolen.safetensors")
    reindex(folder, lambda places: places.update({"a.weight": name}))
    with pytest.raises(ArtifactError, match="not the name of a file in this folder"):
        read(folder)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    folder = tmp_path / "model"
    write(folder, shard_limit=50)
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="a link out of its folder"):
        read(folder)


def test_links_of_a_hugging_face_cache_are_followed(tmp_path):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "1234"
    write(snapshot, dtype="float32")
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir()
    for file in list(snapshot.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(f"../../blobs/{file.name}")
    assert np.array_equal(read(snapshot).weights["a.weight"], WEIGHTS["a.weight"])


def test_missing_and_doubled_tensors_are_all_named(tmp_path):
    write(tmp_path, shard_limit=1)
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    write_file({"b.bias": WEIGHTS["b.bias"]}, first)
    reindex(tmp_path, lambda places: places.update({"gone.weight": second.name}))
    with pytest.raises(ArtifactError) as caught:
        read(tmp_path)
    for part in (f"a.weight missing from {first.name}", f"gone.weight missing from {second.name}", "b.bias doubled in"):
        assert part in str(caught.value)


def test_a_missing_shard_is_named(tmp_path):
    write(tmp_path, shard_limit=1)
    shard = sorted(tmp_path.glob("*.safetensors"))[2]
    shard.unlink()
    with pytest.raises(ArtifactError, match=f"{shard.name} missing"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "weights.pkl"])
def test_pickles_are_refused_and_never_opened(name, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / name)  # opening it would wait for ever
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ArtifactError, match="pickle"):
            read(path)
    with pytest.raises(ArtifactError, match="pickle"):
        read_tensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ArtifactError, match=r"only \.safetensors files are opened"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", "\xff", "[" * 100_000, '{"a": 1, "a": 2}'])
def test_a_config_that_is_no_object_is_refused(text, tmp_path):
    write(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ArtifactError, match=r"config\.json"):
        read(tmp_path)


def test_a_boundless_config_is_not_read(tmp_path):
    write(tmp_path)
    os.truncate(tmp_path / "config.json", 1 << 40)  # sparse
    with pytest.raises(ArtifactError, match="more than the"):
        read(tmp_path)


def test_what_is_no_model_is_said_to_be_none(tmp_path):
    for path, message in [
        (tmp_path / "nowhere", "no such file or folder"),
        (tmp_path, r"no config\.json"),
        (tmp_path / "notes.txt", "not a model"),
    ]:
        if path.suffix:
            path.write_text("")
        with pytest.raises(ArtifactError, match=message):
            kind(path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_text("")
    with pytest.raises(ArtifactError, match="2 GGUF files"):
        kind(tmp_path)


def test_a_number_beyond_float16_is_refused_by_name(tmp_path):
    with pytest.raises(ArtifactError, match=r"w\.weight: values out of float16's range"):
        write(tmp_path, {"w.weight": np.array([1e6], np.float32)}, dtype="float16")


def test_a_disk_that_takes_no_more_is_told_with_its_path(tmp_path):
    """A limit on file sizes fails as a full disk does, in the library, and can be had without filling one."""
    path = tmp_path / "x.safetensors"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            write_file({"a": np.zeros(1 << 16)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(path)
