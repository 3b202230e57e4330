"""Recipes: precedence, messages, types, and the round trip through TOML."""

import dataclasses
from dataclasses import field
from pathlib import Path
from typing import Literal

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from compress.errors import RecipeError
from compress.keys import json_schema
from compress.recipe import load, to_dict, to_toml
from compress.schema import Recipe


@dataclasses.dataclass(frozen=True)
class Bake:
    flour: str
    grams: int = field(default=500, metadata={"help": "Weight.", "min": 1, "max": 5000})
    heat: float = field(default=230.0, metadata={"above": 0})
    steam: bool = True
    shape: Literal["round", "long"] = "round"
    parts: Literal[4, 8] = 4
    rest: int | None = None
    book: Path | None = None
    notes: tuple[Path, ...] = ()
    pans: tuple[str, ...] = ("round",)
    names: dict[str, str] = field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Kitchen:
    seed: int = 0
    bake: Bake | None = None


def write(folder, text):
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


def read(folder, text, **rest):
    return load(Kitchen, write(folder, text), **{"environment": {}} | rest)


def test_later_sources_win_over_earlier_ones(tmp_path):
    recipe = '[bake]\nflour = "rye"\ngrams = 1\nheat = 1.0\nparts = 8\n'
    bake = read(
        tmp_path,
        recipe,
        environment={"COMPRESS_BAKE__GRAMS": "2", "COMPRESS_BAKE__HEAT": "2", "COMPRESS_SEED": "7", "OTHER": "x"},
        sets=["bake.grams=3"],
        flags={"seed": ("--seed", 9)},
    )
    assert bake == Kitchen(seed=9, bake=Bake("rye", grams=3, heat=2.0, parts=8))


def test_an_absent_table_stays_absent_whatever_the_environment_says(tmp_path):
    assert read(tmp_path, "seed = 1\n", environment={"COMPRESS_BAKE__GRAMS": "2"}) == Kitchen(seed=1)
    assert read(tmp_path, "", sets=["bake.flour=rye"]).bake == Bake("rye")


def test_an_empty_table_takes_its_defaults_or_names_what_is_missing(tmp_path):
    with pytest.raises(RecipeError, match=r"recipe\.toml \[bake\]: flour is missing"):
        read(tmp_path, "[bake]\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gram = 1", r"recipe.toml \[bake\]: no key 'gram'; did you mean 'grams'\?"),
        ("zzz = 1", r"recipe.toml \[bake\]: no key 'zzz'$"),
        ('grams = "1"', r'recipe.toml \[bake\]: grams = "1": expected an integer'),
        ("grams = true", r"grams = true: expected an integer"),
        ("grams = 1.0", r"grams = 1.0: expected an integer"),
        ("grams = 0", r"grams = 0: must be at least 1"),
        ("grams = 5001", r"grams = 5001: must be at most 5000"),
        ("heat = 0", r"heat = 0: must be above 0"),
        ("heat = nan", r"heat = NaN: must be above 0"),
        ("heat = inf", r"heat = Infinity: must be finite"),
        (f"heat = {'9' * 400}", r"heat = 9+: must be finite"),
        ("rest = 2147483648", r"rest = 2147483648: must be at most 2147483647"),
        ("rest = 99999999999999999999", r"rest = 99999999999999999999: must be at most"),
        ('book = "a\\u0000b"', r"a path cannot hold a NUL character"),
        ('heat = "hot"', r'heat = "hot": expected a number'),
        ("steam = 1", r"steam = 1: expected true or false"),
        ('shape = "rond"', r"""shape = "rond": expected "round" or "long"; did you mean 'round'\?"""),
        ("parts = 5", r"parts = 5: expected 4 or 8"),
        ("parts = 4.0", r"parts = 4.0: expected 4 or 8"),
        ("book = 3", r"book = 3: expected a path"),
        ("pans = []", r"pans = \[\]: expected at least one item"),
        ("notes = [3]", r"notes = \[3\]: expected a list, each item a path"),
        ('names = "x"', r'names = "x": expected a table, each value text'),
    ],
)
def test_a_wrong_key_is_named_with_file_table_and_what_would_be_right(tmp_path, line, message):
    with pytest.raises(RecipeError, match=message) as error:
        read(tmp_path, f'[bake]\nflour = "rye"\n{line}\n')
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ({"sets": ["bake.gram=1"]}, "--set bake.gram: no key 'gram'; did you mean 'grams'"),
        ({"sets": ["bak.grams=1"]}, "--set bak.grams: no key 'bak'; did you mean 'bake'"),
        ({"sets": ["bake=1"]}, r"--set bake: \[bake\] is a table; name one of its keys: flour, grams"),
        ({"sets": ["seed.x=1"]}, "--set seed.x: no table is called 'seed'"),
        ({"sets": ["bake.grams"]}, "--set bake.grams: expected table.key=value"),
        ({"sets": ["bake.grams=many"]}, "--set bake.grams=many: expected an integer"),
        ({"environment": {"COMPRESS_BAKE__GRAM": "1"}}, "COMPRESS_BAKE__GRAM: no key 'gram'; did you mean 'grams'"),
        ({"environment": {"COMPRESS_BAKE__GRAMS": "x"}}, "COMPRESS_BAKE__GRAMS=x: expected an integer"),
        ({"flags": {"bake.grams": ("--grams", 0)}}, "--grams 0: must be at least 1"),
        (
            {"flags": {"bake.grams": ("--grams", 2)}, "sets": ["bake.grams=2"]},
            "bake.grams is given both by --grams and by --set bake.grams",
        ),
    ],
)
def test_a_wrong_override_is_named_as_it_was_typed(tmp_path, rest, message):
    with pytest.raises(RecipeError, match=message):
        read(tmp_path, '[bake]\nflour = "rye"\n', **rest)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bake = 3", "recipe.toml: bake = 3: expected a table"),
        ("= 3", "recipe.toml: not valid TOML: .*line 1"),
        ("seed = " + "[" * 5000, "recipe.toml: not valid TOML: maximum recursion depth"),
        ("seed = " + "9" * 5000, "recipe.toml: not valid TOML: Exceeds the limit"),
        ("sed = 1", "recipe.toml: no key 'sed'; did you mean 'seed'"),
    ],
)
def test_a_broken_recipe_is_named(tmp_path, text, message):
    with pytest.raises(RecipeError, match=message):
        read(tmp_path, text)


def test_a_byte_order_mark_and_windows_line_ends_are_no_matter(tmp_path):
    (tmp_path / "recipe.toml").write_bytes(b'\xef\xbb\xbfseed = 3\r\n[bake]\r\nflour = "rye"\r\n')
    assert load(Kitchen, tmp_path / "recipe.toml", environment={}) == Kitchen(3, Bake("rye"))


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(RecipeError, match=r"none\.toml: no such recipe"):
        load(Kitchen, tmp_path / "none.toml", environment={})
    with pytest.raises(RecipeError, match="a folder, not a recipe"):
        load(Kitchen, tmp_path, environment={})


def test_paths_start_from_the_folder_of_the_recipe_and_others_from_here(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    recipe = '[bake]\nflour = "rye"\nbook = "a"\nnotes = ["b", "/c"]\n'
    bake = read(tmp_path / "there", recipe, sets=["bake.book=d"]).bake
    assert bake.book == tmp_path / "here/d"
    assert bake.notes == (tmp_path / "there/b", Path("/c"))
    assert read(tmp_path / "there", recipe).bake.book == tmp_path / "there/a"


def test_a_lone_item_is_a_list_of_one_and_none_clears_a_key(tmp_path):
    recipe = '[bake]\nflour = "rye"\nnotes = "/a"\nrest = 3\n'
    bake = read(tmp_path, recipe, sets=["bake.rest=none", 'bake.names={a = "b"}']).bake
    assert bake == Bake("rye", notes=(Path("/a"),), names={"a": "b"})


def test_text_needs_no_quotes_in_an_override(tmp_path):
    bake = read(tmp_path, "", sets=["bake.flour=3", "bake.shape=long", 'bake.notes=["/a", "/b"]', "bake.steam=false"])
    assert bake.bake == Bake("3", shape="long", notes=(Path("/a"), Path("/b")), steam=False)


def test_a_model_is_a_path_if_there_is_one_and_a_name_otherwise(tmp_path):
    (tmp_path / "org/teacher").mkdir(parents=True)
    recipe = '[distill]\nteacher = "org/teacher"\nstudent = "half"\ndata = ["t.txt"]\n[quantize]\nmodel = "org/other"\n'
    found = load(Recipe, write(tmp_path, recipe), environment={})
    assert found.distill.teacher == str(tmp_path / "org/teacher")
    assert (found.distill.student, found.quantize.model) == ("half", "org/other")


def test_keys_that_do_not_go_together_are_named_with_their_table(tmp_path):
    recipe = '[distill]\nteacher = "t"\ndata = "d"\nsteps = 1\nepochs = 1\n'
    with pytest.raises(RecipeError, match=r"recipe\.toml \[distill\]: steps and epochs are both given"):
        load(Recipe, write(tmp_path, recipe), environment={})
    recipe = '[distill]\nteacher = "t"\ndata = "d"\nmix = 1.0\n'
    with pytest.raises(RecipeError, match=r"recipe\.toml \[distill\]: mix = 1.0 must be below 1"):
        load(Recipe, write(tmp_path, recipe), environment={})
    with pytest.raises(RecipeError, match=r"\[quantize\]: group_size = 48: must be 32, 64, 128 or 256"):
        load(Recipe, sets=["quantize.group_size=48"], environment={})


bakes = st.builds(
    Bake,
    flour=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"])),
    grams=st.integers(1, 5000),
    heat=st.floats(1e-300, allow_infinity=False),
    steam=st.booleans(),
    shape=st.sampled_from(["round", "long"]),
    parts=st.sampled_from([4, 8]),
    rest=st.none() | st.integers(-(2**63), 2**31 - 1),
    book=st.none() | st.sampled_from([Path("/a b"), Path("/ü/c")]),
    notes=st.lists(st.sampled_from([Path("/a"), Path("/b")])).map(tuple),
    names=st.dictionaries(st.text(st.characters(codec="ascii", exclude_categories=["Cc"])), st.just("x"), max_size=3),
)


@given(kitchen=st.builds(Kitchen, seed=st.integers(0, 2**31 - 1), bake=st.none() | bakes))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_recipe_written_and_read_is_the_same(tmp_path, kitchen):
    assert read(tmp_path, to_toml(kitchen)) == kitchen


def test_a_resolved_recipe_has_no_absent_table():
    assert to_dict(Kitchen(seed=1)) == {"seed": 1}


def test_the_schema_has_every_key_with_its_help_bounds_and_default():
    bake = json_schema(Kitchen)["properties"]["bake"]
    assert bake["required"] == ["flour"]
    assert bake["additionalProperties"] is False
    assert bake["properties"]["grams"] == {
        "type": "integer",
        "description": "Weight.",
        "minimum": 1,
        "maximum": 5000,
        "default": 500,
    }
    assert bake["properties"]["shape"] == {"enum": ["round", "long"], "default": "round"}
    assert bake["properties"]["notes"]["items"] == {"type": "string"}


def test_every_key_of_every_stage_says_what_it_does():
    def check(schema, name):
        for key, entry in schema["properties"].items():
            if "properties" in entry:
                check(entry, key)
            else:
                assert entry.get("description"), f"[{name}] {key} has no help"

    check(json_schema(Recipe), "recipe")
