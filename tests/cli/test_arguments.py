"""Conditions as the command line has them."""

from __future__ import annotations

from qkv.cli import arguments


class TestValues:
    def test_where_leaves_comparisons_alone(self) -> None:
        for text in ("a == 1", "a <= 1", "a >= 1", "a != 1", "'x=y' in a"):
            assert arguments.join_conditions([text]) == text
        assert arguments.join_conditions(["a=it's"]) == '`a` == "it\'s"'
        assert arguments.join_conditions(["a='Tis Pity"]) == '`a` == "\'Tis Pity"'
        assert arguments.join_conditions(['a="Li']) == "`a` == '\"Li'"
        assert arguments.join_conditions(["a='Li' and b > 1"]) == "`a` == 'Li' and b > 1"
        assert arguments.join_conditions(["first name=Li"]) == "`first name` == 'Li'"
        assert arguments.join_conditions(None) is None

    def test_where_ends_a_text_at_another_condition(self) -> None:
        columns = ("genre", "n", "title", "fresh", "salt and pepper")

        def read(text: str) -> str | None:
            return arguments.join_conditions([text], columns)

        assert read("genre=tea and n=2") == "`genre` == 'tea' and `n` in (2, '2')"
        assert read("title=Pride and Prejudice") == "`title` == 'Pride and Prejudice'"
        assert (
            read("title=Pride and Prejudice or n=2")
            == "`title` == 'Pride and Prejudice' or `n` in (2, '2')"
        )
        assert read("title='a and n=2'") == "`title` == 'a and n=2'"
        assert read("title=Emma (1815)") == "`title` == 'Emma (1815)'"
        assert read("not (title=Emma (1815))") == "not (`title` == 'Emma (1815)')"
        assert read("genre=tea and not fresh") == "`genre` == 'tea' and not fresh"
        assert read("genre=tea and 1 < n < 3") == "`genre` == 'tea' and 1 < n < 3"
        assert read("n in (1, 2) and genre=tea") == "n in (1, 2) and `genre` == 'tea'"
        assert read("salt and pepper=x") == "`salt and pepper` == 'x'"
        assert read("genre='it''s' and n=2") == "`genre` == 'it''s' and `n` in (2, '2')"
        assert read("title=http://a?b=c") == "`title` == 'http://a?b=c'"
        assert read("fresh=true") == "`fresh` in (True, 'true')"
