from __future__ import annotations

from onnxarchive.cli.terminal import count, printable, size, table


def test_a_table_aligns_text_left_and_numbers_right() -> None:
    lines = [*table(["name", "bytes"], [["a", 5], ["longer", 12345]])]
    assert lines == ["name     bytes", "a            5", "longer  12,345"]


def test_numbers_beside_text_are_aligned_left_and_unprintable_characters_escaped() -> None:
    lines = [*table(["name", "bytes"], [["a\n", 1234], ["b", "none"]])]
    assert lines == ["name  bytes", "a\\n   1,234", "b     none"]


def test_a_table_without_rows_is_its_header() -> None:
    assert [*table(["name", "bytes"], [])] == ["name  bytes"]


def test_sizes_name_the_largest_unit_that_they_fill() -> None:
    assert [size(nbytes) for nbytes in (0, 1023, 1024, 1536, 1 << 30, 1 << 50)] == [
        "0 bytes",
        "1,023 bytes",
        "1,024 bytes (1.0 KiB)",
        "1,536 bytes (1.5 KiB)",
        "1,073,741,824 bytes (1.0 GiB)",
        "1,125,899,906,842,624 bytes (1024.0 TiB)",
    ]


def test_counts_have_a_plural() -> None:
    counts = [count(number, "tensor") for number in (0, 1, 2000)]
    assert counts == ["0 tensors", "1 tensor", "2,000 tensors"]


def test_unprintable_characters_are_escaped_and_printable_ones_kept() -> None:
    assert printable("a\x1b[0m\nü\u202e\ud800") == "a\\x1b[0m\\nü\\u202e\\ud800"
