import pytest

from ds_fold.schedule import ScheduleError, compute_order, lower, read_csv, verify, write_csv


def test_written_orders_are_read_back(tmp_path):
    orders = compute_order("aiao", 2, 2, 3)
    write_csv(tmp_path / "s.csv", orders)
    assert read_csv(str(tmp_path / "s.csv"), 2, 2, 3) == orders


def test_bubbles_are_skipped(tmp_path):
    (tmp_path / "s.csv").write_text("F0.0,,,B0.0\n,F0.0,B0.0,\n\n")
    orders = read_csv(str(tmp_path / "s.csv"), 2, 1, 1)
    assert [[str(a) for a in order] for order in orders] == [["F0.0", "B0.0"]] * 2
    verify(lower(orders, 1, 1))


@pytest.mark.parametrize("text,message", [
    ("F0.0,B0.0\n", "has 1 rows, but there are 2 pipeline ranks"),
    ("F0.0,B0.0\nF0.0,Z0.0\n", "row 2, column 2.*'Z0.0'"),
    ("F0.0,B0.0\nF0.0,SA0.0\n", "row 2, column 2.*not a compute action"),
    ("F0.0,B0.0\nF0.0,B0.1\n", "row 2, column 2.*outside segments=0..0, micro-batches=0..0"),
    ("F0.0,B0.0\nF0.0,__import__('os')\n", "row 2, column 2"),
])
def test_bad_files_name_the_cell(tmp_path, text, message):
    (tmp_path / "s.csv").write_text(text)
    with pytest.raises(ScheduleError, match=message):
        read_csv(str(tmp_path / "s.csv"), 2, 1, 1)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ScheduleError, match="nothing.csv.*cannot be read"):
        read_csv(str(tmp_path / "nothing.csv"), 2, 1, 1)
