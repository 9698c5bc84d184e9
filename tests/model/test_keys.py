from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

import pytest
from findings import Findings
from hypothesis import given, settings, strategies as st
from steps import steps

from onnxarchive.errors import ArchiveFormatError, Strict
from onnxarchive.model.keys import (
    MODEL_PROTO,
    Keys,
    check_names,
    fold,
    is_asset_name,
    is_key,
    is_plain_path,
)


def _assign(*names: str) -> list[str]:
    keys = Keys()
    return [keys.assign(name) for name in names]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("layer.0/weight", "layer_0_weight"),
        ("weight", "weight"),
        ("Weight", "Weight"),
        ("_weight", "_weight"),
        ("__weight", "_weight"),
        ("____weight", "_weight"),
        ("__MODEL_PROTO", "_MODEL_PROTO"),
        ("/weight", "_weight"),
        ("//weight", "_weight"),
        ("../../etc/passwd", "_etc_passwd"),
        ("a b\tc", "a_b_c"),
        ("größe", "gr__e"),
        ("0", "_0"),
        ("7.weight", "_7_weight"),
        ("_7", "_7"),
        ("__7", "_7"),
        ("", "tensor"),
        ("_", "tensor"),
        ("__", "tensor"),
        ("...", "tensor"),
        ("重み", "tensor"),
        ("assets", "assets_"),
        ("Assets", "Assets_"),
        ("ASSETS", "ASSETS_"),
        ("assets/", "assets_"),
        ("assets_", "assets_"),
        ("asset", "asset"),
        ("con", "con_"),
        ("NUL", "NUL_"),
        ("com1", "com1_"),
        ("Lpt9", "Lpt9_"),
        ("prn", "prn_"),
        ("aux", "aux_"),
        ("com", "com"),
        ("com10", "com10"),
        ("con.weight", "con_weight"),
        ("console", "console"),
        ("a\0b", "a_b"),
        ("²", "tensor"),
        ("x" * 255, "x" * 255),
        ("x" * 256, "x" * 255),
        ("x" * 300, "x" * 255),
        ("0" * 255, "_" + "0" * 254),
    ],
)
def test_a_key_is_the_name_if_possible(name: str, key: str) -> None:
    assert _assign(name) == [key]
    assert is_key(key)


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (["layer.0/weight", "layer_0_weight"], ["layer_0_weight", "layer_0_weight_2"]),
        (["w", "w", "w", "w"], ["w", "w_2", "w_3", "w_4"]),
        (["w", "W"], ["w", "W_2"]),
        (["W", "w", "W"], ["W", "w_2", "W_3"]),
        (["w_2", "w", "w"], ["w_2", "w", "w_3"]),
        (["w", "w_2", "w"], ["w", "w_2", "w_3"]),
        (["w", "w", "w_2"], ["w", "w_2", "w_2_2"]),
        (["w", "w_3", "w", "w"], ["w", "w_3", "w_2", "w_4"]),
        (["", "_", "tensor"], ["tensor", "tensor_2", "tensor_3"]),
        (["con", "con_"], ["con_", "con__2"]),
        (["x" * 300, "x" * 255], ["x" * 255, "x" * 253 + "_2"]),
    ],
    ids=lambda names: names[0][:20],
)
def test_a_number_distinguishes_equal_keys(names: list[str], keys: list[str]) -> None:
    assert _assign(*names) == keys


def test_a_thousand_equal_names_of_any_length_get_different_keys() -> None:
    for name in ("weight", "w" * 300, "", "con"):
        keys = _assign(*[name] * 1000)
        assert len({fold(key) for key in keys}) == 1000
        assert all(is_key(key) for key in keys)


def _endings(count: int, length: int) -> list[str]:
    """Different endings of this length."""
    endings = itertools.product("abcdefghijklmnop", repeat=length)
    return ["".join(ending) for ending in itertools.islice(endings, count)]


AWKWARD: dict[str, Callable[[int], list[str]]] = {
    "one name": lambda count: ["w"] * count,
    "a long name": lambda count: ["w" * 300] * count,
    "a name in many cases": lambda count: [name.upper() for name in _endings(count, 5)] * 2,
    "numbered keys before": lambda count: [*(f"w_{n}" for n in range(2, count)), *["w"] * count],
    "long names, each twice": lambda count: ["w" * 250 + end for end in _endings(count, 5)] * 2,
    "long names that are cut": lambda count: ["w" * 255 + end for end in _endings(count, 5)],
    "long names, cut in many places": lambda count: [
        "w" * length + end for length in range(248, 256) for end in _endings(count // 8, 4)
    ],
}


@pytest.mark.parametrize("kind", AWKWARD)
def test_the_search_for_keys_takes_steps_in_proportion_to_the_names(kind: str) -> None:
    names = AWKWARD[kind]
    assert steps(lambda: _assign(*names(2000))) < 5 * steps(lambda: _assign(*names(500)))


def _with_lowest_numbers(names: Sequence[str]) -> list[str]:
    """Keys by definition: the name, or with the lowest number that makes it different."""
    keys: list[str] = []
    taken: set[str] = set()
    for name in names:
        (base,) = _assign(name)
        numbered = (base[: 254 - len(str(n))] + f"_{n}" for n in itertools.count(2))
        keys.append(next(it for it in itertools.chain([base], numbered) if it.lower() not in taken))
        taken.add(keys[-1].lower())
    return keys


_text = st.text(st.characters(), max_size=12)
_awkward = st.text("aA_.0/ü", max_size=4)
_long = st.builds(lambda text, count: text * count, _awkward, st.integers(1, 300))
_device = st.sampled_from(["con", "PRN", "Aux", "nul", "com0", "COM9", "lpt1", "assets", "ASSETS"])


@settings(max_examples=300, deadline=None)
@given(st.lists(_text | _awkward | _long | _device, max_size=30))
def test_any_names_get_different_keys_that_every_file_system_takes(names: list[str]) -> None:
    keys = _assign(*names)
    assert all(is_key(key) for key in keys)
    assert len({key.lower() for key in keys}) == len(keys)
    assert not {key.lower() for key in keys} & {
        *("con", "prn", "aux", "nul", "assets"),
        *(f"{port}{digit}" for port in ("com", "lpt") for digit in range(10)),
    }
    assert _assign(*names) == keys == _with_lowest_numbers(names)
    check_names([*keys, MODEL_PROTO], Strict())


@pytest.mark.parametrize("kind", AWKWARD)
def test_keys_have_the_lowest_number_that_is_free(kind: str) -> None:
    names = AWKWARD[kind](150)
    assert _assign(*names) == _with_lowest_numbers(names)


@given(st.text(st.characters(max_codepoint=0x250), max_size=20))
def test_names_are_compared_under_ascii_down_casing_alone(name: str) -> None:
    folded = fold(name)
    assert folded.encode() == name.encode().lower()  # bytes.lower() is that of ASCII
    assert fold(folded) == folded


KEYS = [
    *("a", "_", "_a", "A9", "x" * 255, "con", "nul", "COM1", "asset", "assets_", "_assets", "_0")
]
NO_KEYS = [
    *("", "0", "9a", "__", "__a", "__MODEL_PROTO", "a.b", "a/b", "a-b", "a b", "a\n", "\na"),
    *("a\0", "größe", "x" * 256, "assets", "ASSETS", "aSSets"),
    "\uff41",  # str.isidentifier() takes this letter
]


def test_keys_are_identifiers_other_than_the_folder_of_assets() -> None:
    assert [name for name in KEYS if not is_key(name)] == []
    assert [name for name in NO_KEYS if is_key(name)] == []


PLAIN = [
    *("tokenizer.json", "a/b/c", "größe.txt", "重み", "a b", "...", "..a", ".hidden", "a.", "~"),
    *("-", "con", "__MODEL_PROTO", "x" * 255, "/".join(["x" * 250] * 4), "é" * 127, "a?*<>|\"'"),
]
NO_ASSETS = [
    *("ab:c", "1:/a", ";", "a;1", "x" * 256, "é" * 128),
    "/".join(["x" * 250] * 4) + "/" + "y" * 20,
    "e\u0301",  # not composed
    "a/\u212b",  # the sign of Angstrom is composed to a letter
    "\ud800",
]
NOT_PLAIN = [
    *("", "/", "/a", "a/", "a//b", "//", ".", "./a", "a/.", "a/./b", "..", "../a", "a/.."),
    *("a/../b", "a\\b", "..\\a", "\\a", "C:", "a:b", "C:/a", "a\0", "a\nb", "\x1f", "a\x1fb"),
    *("\x7f", "a\x7fb", "a\x80b", "\x9f", "a\x9fb"),
]


def test_plain_paths_are_relative_and_most_of_them_are_those_of_assets() -> None:
    paths = [*PLAIN, *NO_ASSETS, *NOT_PLAIN]
    assert [path for path in paths if is_plain_path(path)] == PLAIN + NO_ASSETS
    assert [path for path in paths if is_asset_name(f"assets/{path}")] == PLAIN


@pytest.mark.parametrize("name", ["a", "asset/a", "Assets/a", "assets", "xassets/a", "/assets/a"])
def test_an_asset_name_begins_with_the_folder_of_assets(name: str) -> None:
    assert not is_asset_name(name)


def test_an_asset_name_has_at_most_1024_bytes_with_its_prefix() -> None:
    path = "/".join(["x" * 200] * 5)
    fill = "y" * (1024 - len(f"assets/{path}/"))
    assert is_asset_name(f"assets/{path}/{fill}")
    assert not is_asset_name(f"assets/{path}/{fill}y")


@pytest.mark.parametrize(
    ("names", "broken"),
    [
        ([MODEL_PROTO], []),
        (["a", "b", "assets/a", "assets/b/c", "assets/b/d", MODEL_PROTO], []),
        ([], [("MODEL-1", None)]),
        (["a"], [("MODEL-1", "a")]),
        ([MODEL_PROTO, "a"], [("MODEL-1", "a")]),
        (["__Model_Proto"], [("VERSION-1", "__Model_Proto"), ("MODEL-1", "__Model_Proto")]),
        (["__OTHER", MODEL_PROTO], [("VERSION-1", "__OTHER")]),
        (["a", "__MODEL_PROTO_", MODEL_PROTO], [("MODEL-4", "__MODEL_PROTO_")]),
        (["__MODEL_PROTO_a", "a", MODEL_PROTO], [("MODEL-4", "__MODEL_PROTO_a")]),
        (["__MODEL_PROTO_b", "__MODEL_PROTO_a", MODEL_PROTO], [("MODEL-4", "__MODEL_PROTO_b")]),
        (["__MODEL_PROTO_a", "__MODEL_PROTO_b", MODEL_PROTO], []),
        (["assets/\U00050005", MODEL_PROTO], [("ASSET-1", "assets/\U00050005")]),
        (["Assets", MODEL_PROTO], [("KEY-1", "Assets")]),
        (["x" * 256, MODEL_PROTO], [("KEY-1", "x" * 256)]),
        (["a.b", MODEL_PROTO], [("KEY-1", "a.b")]),
        (["", MODEL_PROTO], [("KEY-1", "")]),
        (["a\n", MODEL_PROTO], [("KEY-1", "a\n")]),
        (["a/b", MODEL_PROTO], [("KEY-1", "a/b")]),
        (["..", MODEL_PROTO], [("KEY-1", "..")]),
        (["dir/", MODEL_PROTO], [("KEY-1", "dir/")]),
        (["Assets/a", MODEL_PROTO], [("KEY-1", "Assets/a")]),
        (["größe", MODEL_PROTO], [("KEY-1", "größe")]),
        (["assets/e\u0301", MODEL_PROTO], [("ASSET-1", "assets/e\u0301")]),
        (["assets/a;1", MODEL_PROTO], [("ASSET-1", "assets/a;1")]),
        ([None, MODEL_PROTO], []),  # NAME-1 has been reported
        (["a", None], [("MODEL-1", None)]),
        (["assets/", MODEL_PROTO], [("ASSET-1", "assets/")]),
        (["assets/../a", MODEL_PROTO], [("ASSET-1", "assets/../a")]),
        (["a", "a", MODEL_PROTO], [("NAME-2", "a")]),
        (["a", "A", MODEL_PROTO], [("NAME-2", "A")]),
        ([MODEL_PROTO, MODEL_PROTO], [("NAME-2", MODEL_PROTO)]),
        (["assets/a", "assets/A", MODEL_PROTO], [("NAME-2", "assets/A")]),
        (["assets/ä", "assets/Ä", MODEL_PROTO], []),  # ASCII alone
        (["assets/a", "assets/a/b", MODEL_PROTO], [("NAME-2", "assets/a/b")]),
        (["assets/a/b", "assets/a", MODEL_PROTO], [("NAME-2", "assets/a/b")]),
        (["assets/A", "assets/a/b/c", MODEL_PROTO], [("NAME-2", "assets/a/b/c")]),
        (["assets/A/b", "assets/a/B", MODEL_PROTO], [("NAME-2", "assets/a/B")]),
        (["assets/a/b", "assets/A", MODEL_PROTO], [("NAME-2", "assets/a/b")]),
        (["assets/a", "assets/ab", "assets/a.b", MODEL_PROTO], []),
        (
            ["assets/a/b", "assets/a-", "assets/a/b/c", "assets/a", MODEL_PROTO],
            [("NAME-2", "assets/a/b"), ("NAME-2", "assets/a/b/c")],  # of one folder each
        ),
        (["assets/a/../b", "assets/a", MODEL_PROTO], [("ASSET-1", "assets/a/../b")]),
        (["a.b", "A.b", MODEL_PROTO], [("KEY-1", "a.b"), ("KEY-1", "A.b"), ("NAME-2", "A.b")]),
    ],
    ids=str,
)
def test_names_of_entries_are_checked(
    names: list[str | None], broken: list[tuple[str, str | None]]
) -> None:
    collected = Findings()
    check_names(names, collected)
    assert collected.pairs == broken
    assert all(len(message) < 600 for message in collected.messages)
    if broken:
        with pytest.raises(ArchiveFormatError) as caught:
            check_names(names, Strict())
        assert (caught.value.rule, caught.value.entry) == broken[0]


def test_a_name_that_is_no_key_is_refused_with_the_names_that_are_allowed() -> None:
    expected = (
        "expected the name of a model, a name in assets/, or a key ([A-Za-z_][A-Za-z0-9_]*, at "
        "most 255 bytes, not 'assets' in upper, lower or mixed case), found 'Assets'"
    )
    with pytest.raises(ArchiveFormatError, match=re.escape(expected)):
        check_names(["Assets", MODEL_PROTO], Strict())


def test_a_last_name_that_may_not_be_the_last_is_not_checked() -> None:
    check_names(["a"], Strict(), are_all=False)
    check_names([], Strict(), are_all=False)


def test_an_asset_name_that_is_not_composed_is_quoted_with_escapes() -> None:
    with pytest.raises(ArchiveFormatError, match=r"Form C.*found 'assets/e\\u0301'"):
        check_names(["assets/e\u0301", MODEL_PROTO], Strict())


def test_the_folders_of_names_are_not_compared_one_by_one() -> None:
    long = ["assets" + "/a" * count for count in range(1, 500)]
    # Far longer than allowed. To list all their folders would take longer than a test may.
    longer = ["assets" + "/a" * 32_000 + f"/{number}" for number in range(200)]
    collected = Findings()
    check_names([*long, *longer, MODEL_PROTO], collected)
    rules = collected.rules
    assert (rules.count("NAME-2"), rules.count("ASSET-1")) == (498, 200)
