"""Pictures of rows: places in prompts, patches, and files that are refused by row and name before anything starts."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
from pyarrow import parquet

from rljob_api.spec import RLJobSpec
from rljob_worker.data.colors import color_rows
from rljob_worker.data.dataset import PromptSource
from rljob_worker.data.places import text_with_places, with_places
from rljob_worker.data.row_store import RowStore
from rljob_worker.data.tokenizer import load_tokenizer, prepare_tokenizer
from rljob_worker.driver.inputs import _pictures
from rljob_worker.errors import UserError
from rljob_worker.flow import GroupPool
from rljob_worker.models.pictures import IMAGE_TOKEN, MARK, PICTURE_TOKENS, PictureFacts, batch_pictures
from rljob_worker.trainer.batches import PackedBatch
from rljob_worker.types import Picture, Prompt, TrainBatch

MakeSpec = Callable[..., RLJobSpec]
WriteJsonl = Callable[..., str]
MODEL = {
    "random": {
        "config": {
            "model_type": "qwen2_5_vl",
            "text_config": {},
            "vision_config": {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2},
        }
    }
}
FSDP = {"model": MODEL, "training": {"backend": "FSDP"}, "reward": {"name": "length"}}


def png(width: int = 32, height: int = 32, color: tuple[int, int, int] = (200, 0, 0)) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of some bytes that says it has so many pixels."""
    content = bytearray(png())
    content[16:24] = struct.pack(">II", width, height)
    content[29:33] = struct.pack(">I", zlib.crc32(bytes(content[12:29])))
    return bytes(content)


@pytest.fixture
def prompts_of(make_spec: MakeSpec, tmp_path: Path) -> Callable[..., list[Prompt]]:
    def read(data: dict[str, Any], **blocks: Any) -> list[Prompt]:
        spec = make_spec({"labelKey": None, "imageKey": "images", "shuffle": False} | data, **(FSDP | blocks))
        source = PromptSource(spec, load_tokenizer(prepare_tokenizer(spec, tmp_path / "tokenizer")))
        return source.next_prompts(sum(source.rows.values()))

    return read


@pytest.mark.parametrize("chat", [False, True])
def test_pictures_have_their_places_once(
    chat: bool, tmp_path: Path, write_jsonl: WriteJsonl, prompts_of: Callable[..., list[Prompt]]
) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below/one.png").write_bytes(png(32, 48))
    (tmp_path / "two.png").write_bytes(png(64, 32, (0, 200, 0)))
    path = write_jsonl(
        [
            {"prompt": "what", "images": "below/one.png"},
            {"prompt": "first <image> then <image>", "images": ["below/one.png", "two.png"]},
            {"prompt": "what", "images": None},
        ]
    )
    one, two, none = prompts_of({"path": path, "applyChatTemplate": chat})
    assert [picture.grid for picture in two.pictures] == [(1, 6, 4), (1, 4, 8)]
    assert one.pictures[0] == two.pictures[0] != two.pictures[1]
    assert one.pictures[0].patches.dtype == np.uint8
    assert one.pictures[0].size == (32, 48)
    assert one.text.count(IMAGE_TOKEN) == 1
    assert none.pictures == ()
    assert IMAGE_TOKEN not in none.text
    # As many places as features, in the order of the text.
    most = max(set(two.token_ids), key=two.token_ids.count)
    assert one.token_ids.count(most) == 6
    assert two.token_ids.count(most) == 6 + 8
    assert "images" not in one.metadata
    assert "images" not in one.row


def test_bytes_in_parquet_are_pictures(tmp_path: Path, prompts_of: Callable[..., list[Prompt]]) -> None:
    rows = [
        {"prompt": "what", "images": [{"bytes": png(), "path": None}]},
        {"prompt": "what", "images": [{"bytes": png(color=(0, 0, 9)), "path": "gone.png"}] * 2},
    ]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path)
    one, two = prompts_of({"path": str(path)})
    assert len(one.pictures) == 1
    assert two.pictures[0] == two.pictures[1] != one.pictures[0]


@pytest.mark.parametrize(
    ("images", "said"),
    [
        ("gone.png", "'gone.png' is no file"),
        ("https://example.org/a.png", "is a URL"),
        ("file:///etc/passwd", "is a URL"),
        ("../outside.png", "leads out of"),
        ("link.png", "'link.png' leads out of"),
        ("/etc/hostname", "leads out of"),
        ("folder.png", "'folder.png' is no file"),
        ("pipe.png", "'pipe.png' is no file"),
        ("text.png", "'text.png' is no picture"),
        ("empty.png", "'empty.png' is no picture"),
        ("cut.png", "'cut.png' is damaged"),
        ("bomb.png", "'bomb.png' says that it has .*a decompression bomb"),
        ("large.png", "'large.png' says that it has .*a decompression bomb"),
        ("thin.png", "'thin.png' is 201 x 1 pixels"),
        ("eps.eps", "'eps.eps' is no picture"),
        (7, "number 0 is int"),
        ("", "number 0 is str"),
        (["good.png", None], "number 1 is NoneType"),
        ({"bytes": None, "path": None}, "number 0 is NoneType"),
        (["good.png", "good.png"], "has 2 pictures, and its prompt places for 1"),
    ],
)
def test_a_picture_that_cannot_be_used_is_named_with_its_row(
    images: object, said: str, tmp_path: Path, make_spec: MakeSpec
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "outside.png").write_bytes(png())
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    (folder / "folder.png").mkdir()
    os.mkfifo(folder / "pipe.png")
    content = {
        "good": png(), "text": b"not a picture at all", "empty": b"", "cut": png(300, 300)[:-40], "thin": png(201, 1),
        "bomb": bomb(60000, 60000), "large": bomb(9000, 9000),
    }  # fmt: skip
    for name, value in content.items():
        (folder / f"{name}.png").write_bytes(value)
    (folder / "eps.eps").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    rows = [{"prompt": "see <image> ?", "images": "good.png"}, {"prompt": "see <image> ?", "images": images}]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    spec = make_spec({"path": str(path), "labelKey": None, "imageKey": "images"}, **FSDP)
    tokenizer = load_tokenizer(prepare_tokenizer(spec, tmp_path / "tokenizer"))
    with pytest.raises(UserError, match=said) as raised:
        PromptSource(spec, tokenizer).next_prompts(2)
    assert "row 1" in str(raised.value)


@pytest.mark.parametrize(
    ("images", "said"), [("cut.png", "'cut.png' is damaged"), ("gone.png", "'gone.png' is no file in ")]
)
def test_a_row_that_is_left_out_may_have_a_picture_that_cannot_be_read(
    images: str, said: str, tmp_path: Path, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is found damaged in a step: the run goes on without its row."""
    monkeypatch.setattr("rljob_worker.data.pictures._DECODED_PIXELS", 0)
    (tmp_path / "good.png").write_bytes(png())
    (tmp_path / "cut.png").write_bytes(png(300, 300)[:-40])
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "see <image> ?", "images": name} for name in ("good.png", images, "good.png")]
    path.write_text("\n".join(map(json.dumps, rows)))

    def drawn(skip: list[int]) -> list[Prompt]:
        data = {"path": str(path), "labelKey": None, "imageKey": "images", "shuffle": False, "skip": skip}
        spec = make_spec(data, **FSDP)
        tokenizer = load_tokenizer(prepare_tokenizer(spec, tmp_path / "tokenizer"))
        return [one.prompt for one in GroupPool(PromptSource(spec, tokenizer)).draw(2)]

    with pytest.raises(UserError, match=said) as raised:
        drawn([])
    assert str(raised.value).count("row 1: ") == 1, "it is named once"
    assert [prompt.uid for prompt in drawn([1])] == ["rows/0", "rows/2"]


def test_a_picture_whose_file_is_another_is_another_row(
    tmp_path: Path, make_spec: MakeSpec, write_jsonl: WriteJsonl
) -> None:
    for number in range(8):
        (tmp_path / f"{number}.png").write_bytes(png(color=(number, 0, 0)))
    path = write_jsonl([{"prompt": f"what {number}", "images": f"{number}.png"} for number in range(8)])
    spec = make_spec({"path": path, "labelKey": None, "imageKey": "images"}, **FSDP)
    tokenizer = load_tokenizer(prepare_tokenizer(spec, tmp_path / "tokenizer"))
    store = RowStore(tmp_path)
    source = PromptSource(spec, tokenizer)
    source.remember_rows(store)
    cursor = source.state()
    PromptSource(spec, tokenizer).restore(cursor)
    (tmp_path / "5.png").write_bytes(png(color=(99, 99, 99)))
    with pytest.raises(UserError, match="changed"):
        PromptSource(spec, tokenizer).restore(cursor)
    mended = PromptSource(spec, tokenizer)
    mended.compare_rows(store)
    mended.restore(cursor)
    assert mended.mended == ("data/5",)


def test_a_column_that_is_absent_is_named(write_jsonl: WriteJsonl, prompts_of: Callable[..., list[Prompt]]) -> None:
    path = write_jsonl([{"prompt": "what", "image": "a.png"}])
    with pytest.raises(UserError, match=r"row 0.*'images'.*is absent; the keys there are: 'prompt', 'image'"):
        prompts_of({"path": path})


def test_code_of_a_model_folder_is_not_run_for_pictures(
    make_spec: MakeSpec, write_jsonl: WriteJsonl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks whether to run it, and takes `y` from whatever is typed next."""
    monkeypatch.setattr("builtins.input", lambda *prompt: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "a.png").write_bytes(png())
    path = write_jsonl([{"prompt": "what", "images": "a.png"}])
    spec = make_spec({"path": path, "labelKey": None, "imageKey": "images"}, **FSDP)
    folder, ran = prepare_tokenizer(spec, tmp_path / "evil"), tmp_path / "ran"
    (folder / "evil.py").write_text(
        f"from transformers import BaseImageProcessor\nopen({str(ran)!r}, 'w')\n"
        "class Evil(BaseImageProcessor): size = {'shortest_edge': 1}\n"
    )
    file = folder / "processor_config.json"
    own = {"image_processor_type": "Evil", "auto_map": {"AutoImageProcessor": "evil.Evil"}}
    (folder / "preprocessor_config.json").write_text(json.dumps(json.loads(file.read_text())["image_processor"] | own))
    file.unlink()
    with pytest.raises(UserError, match=r"preprocessor_config\.json: no image processor that transformers has"):
        PromptSource(spec, load_tokenizer(folder))
    assert not ran.exists()


def test_large_pictures_are_made_smaller(
    tmp_path: Path, write_jsonl: WriteJsonl, prompts_of: Callable[..., list[Prompt]]
) -> None:
    (tmp_path / "large.png").write_bytes(png(320, 320))
    data = {"path": write_jsonl([{"prompt": "what", "images": "large.png"}])}
    [whole] = prompts_of(data)
    [small] = prompts_of(data, model=MODEL | {"maxPixels": 6400})
    assert whole.pictures[0].grid == (1, 40, 40)
    assert small.pictures[0].grid == (1, 10, 10)
    with pytest.raises(UserError, match=r"spec\.model\.maxPixels: 784 is below"):
        prompts_of(data, model=MODEL | {"maxPixels": 784})
    with pytest.raises(
        UserError, match=r"spec\.model\.maxPixels: 1048577 is above the image processor's most, 1048576"
    ):
        prompts_of(data, model=MODEL | {"maxPixels": 2**20 + 1})


def test_colours_are_named(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec({"synthetic": {"task": "NameColor", "symbols": 3, "rows": 40, "answerSymbols": 2}}, **FSDP)
    assert spec.data.synthetic is not None
    drawn = color_rows(spec.data.synthetic)
    assert drawn == color_rows(spec.data.synthetic)
    assert {name for name, _ in drawn} == {"red", "green", "blue"}
    assert len({picture for _, picture in drawn}) == 40
    for name, picture in drawn:
        # The colour is the strongest of the three where it is.
        pixels = np.asarray(PIL.Image.open(io.BytesIO(picture))).reshape(-1, 3).astype(int)
        middle = pixels[np.argmax(np.ptp(pixels, axis=1))]
        assert ["red", "green", "blue"][int(middle.argmax())] == name
    source = PromptSource(spec, load_tokenizer(prepare_tokenizer(spec, tmp_path / "tokenizer")))
    [prompt] = source.next_prompts(1)
    assert prompt.label is not None
    assert len(prompt.pictures) == 1
    assert len(set(prompt.label.split())) == 1
    other = spec.model_copy(
        update={"data": spec.data.model_copy(update={"synthetic": spec.data.synthetic.model_copy(update={"seed": 1})})}
    )
    with pytest.raises(UserError, match="changed"):
        PromptSource(other, load_tokenizer(tmp_path / "tokenizer")).restore(source.state())


def test_placeholders_are_those_of_the_tokenizer_and_of_data_with_pictures(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = make_spec({"synthetic": {"task": "NameColor"}}, **FSDP)
    folder, model = prepare_tokenizer(spec, tmp_path / "model"), cast(Any, SimpleNamespace(model_type="qwen2_5_vl"))
    tokenizer = load_tokenizer(folder)
    names, vocabulary = ("vision_start", "vision_end", "image", "video"), tokenizer.get_vocab()
    ids = {name: vocabulary[token] for name, token in zip(names, PICTURE_TOKENS)}
    config = {"model_type": "qwen2_5_vl"} | {f"{name}_token_id": number for name, number in ids.items()}
    (folder / "config.json").write_text(json.dumps(config))
    facts = _pictures(spec, model, folder, tokenizer)
    assert facts is not None
    assert facts.placeholders == tuple(sorted(ids.values()))
    # Of text alone nothing is left out: a teacher's whole distributions, for one, are compared with it.
    text = make_spec({"synthetic": {"task": "Copy"}}, **FSDP)
    assert _pictures(text, model, folder, tokenizer) is None
    (folder / "config.json").write_text(json.dumps(config | {"image_token_id": ids["image"] + 1}))
    with pytest.raises(UserError, match=rf"is token {ids['image']} of its tokenizer, and image_token_id"):
        _pictures(spec, model, folder, tokenizer)


def test_places_of_pictures() -> None:
    user = [{"role": "system", "content": "s"}, {"role": "user", "content": "a <image> b"}]
    image = {"type": "image"}
    assert with_places(user, 1)[1]["content"] == [
        {"type": "text", "text": "a "}, image, {"type": "text", "text": " b"},
    ]  # fmt: skip
    plain = [{"role": "user", "content": "a"}]
    assert with_places(plain, 2)[0]["content"] == [image, image, {"type": "text", "text": "a"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, image]}]
    assert with_places(parts, 1) == parts
    with pytest.raises(ValueError, match="2 pictures, and its prompt places for 1"):
        with_places(user, 2)
    assert text_with_places("a", 1) == f"{MARK} a"
    assert text_with_places("a <image>", 1) == f"a {MARK}"
    # Of a row without pictures it is text.
    assert text_with_places("a <image>", 0) == "a <image>"


FACTS = PictureFacts(9, (8, 9), merge=2, patch=2, frames=1, mean=(0.0,) * 3, std=(1.0,) * 3)


def picture(grid: tuple[int, int, int], value: int) -> Picture:
    patches = np.full((int(np.prod(grid)), 12), value, dtype=np.uint8)
    return Picture(patches, grid, str(value), (1, 1), b"")


def test_positions_go_on_after_the_largest_of_a_picture() -> None:
    tokens = np.array([1, 9, 9, 9, 9, 9, 9, 2, 3])
    found = FACTS.positions(tokens, [(1, 4, 6)])
    assert found.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5],
        [0, 1, 1, 1, 2, 2, 2, 4, 5],
        [0, 1, 2, 3, 1, 2, 3, 4, 5],
    ]
    with pytest.raises(ValueError, match="pictures of 1 tokens, and 6 places"):
        FACTS.positions(tokens, [(1, 2, 2)])
    with pytest.raises(ValueError, match="not side by side"):
        FACTS.places(np.array([9, 1, 9, 9, 9]), [(1, 4, 4)])


def test_a_batch_has_each_picture_once_and_rows_have_their_own() -> None:
    one, two = picture((1, 2, 2), 1), picture((1, 2, 4), 2)
    streams = [np.array([1, 9, 5, 6]), np.array([1, 9, 5, 7, 8]), np.array([3, 4]), np.array([9, 2, 9, 9, 5])]
    seen = batch_pictures(streams, [[one], [one], [], [one, two]], FACTS)
    assert len(seen.grids) == 2
    assert len(seen.patches) == 4 + 8
    batch = TrainBatch.of_responses(
        streams, np.array([2, 2, 1, 4]), [np.zeros(n, np.float32) for n in (2, 3, 1, 1)], np.zeros(4, np.float32),
        pictures=seen,
    )  # fmt: skip
    packed = PackedBatch(batch)
    row = packed.micro_batch(np.array([3, 0]))
    assert row.patches is not None
    assert row.grids is not None
    assert row.patches[:, 0].tolist() == [1] * 4 + [2] * 8
    assert row.grids.tolist() == [[1, 2, 2], [1, 2, 4]]
    assert row.pictures == (0, 1, 0)
    assert row.input_ids.tolist() == [[9, 2, 9, 9, 1, 9, 5]]
    assert row.position_ids.shape == (4, 1, 7)
    assert row.position_ids[0, 0].tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert row.position_ids[3, 0].tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert row.position_ids[2, 0].tolist() == [0, 1, 2, 2, 0, 1, 2]
    assert packed.micro_batch(np.array([2])).patches is None
    with pytest.raises(ValueError, match="do not fit its streams"):
        PackedBatch(
            TrainBatch.of_responses(
                streams[:1], np.array([2]), [np.zeros(2, np.float32)], np.zeros(1, np.float32), pictures=seen
            )
        )
