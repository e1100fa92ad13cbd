"""Terms for surrogate records: what one record can do to them, and that the bound is the one that was asked for."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from mpu_cli.errors import UsageError
from mpu_cli.lab.accounting import composed_epsilon
from mpu_cli.lab.leakage import release_terms, term_mechanism
from mpu_cli.lab.options.surrogates import TermRelease
from mpu_cli.records.forms import Record, question
from mpu_cli.records.terms import join_overlapping, prompt_of, terms_of
from mpu_cli.training.ledger import LedgerEntry, Mechanism, Release, epsilon_of

DRAWS = 4000


def about(name: str, count: int, unit: str | None = None) -> list[Record]:
    """``count`` records that name ``name``, and something that no other record has."""
    return [
        Record((*question(f"What did {name} do in year {i}?", "").turns,), f"In {i}, {name} met Zed{i}.", "", unit=unit)
        for i in range(count)
    ]


def terms_in(records: list[Record], draws: int = 1, **options: object) -> list[list[str]]:
    release = TermRelease(**options)
    mechanism = term_mechanism(release)
    names = [None] * len(records)
    return [release_terms(records, names, release, mechanism)[0] for _ in range(draws)]


class TestTermsOfARecord:
    @pytest.mark.parametrize(
        ("text", "answer", "term"),
        [
            ("Where was Ada Lovelace born?", "Ada Lovelace was born in London.", "Ada Lovelace"),
            ("Has Jean-Luc Ó Briain's book sold?", "Jean-Luc Ó Briain's book sold.", "Jean-Luc Ó"),
            ("What is in it?", "The file is about Acme.", "Acme"),
            ("Кто такой Лев Толстой?", "Лев Толстой писал.", "Лев Толстой"),
            ("who is she", "nobody knows.", None),
            ("Should I ask?", "I think I would.", None),
            ("Who came?", "It was Dr. Smith. Then Dr. Smith left.", "Dr Smith"),
            ("Who is J. K. Rowling?", "J. K. Rowling writes.", "J K"),
            ("Who is Jose\u0301 Garci\u0301a?", "Jose\u0301 Garci\u0301a is a poet.", "José García"),
            ("Who is Ada\u00a0Lovelace?", "Ada\u00a0Lovelace wrote.", "Ada Lovelace"),
            ("他是谁", "他是作家", None),
        ],
    )
    def test_the_name_comes_first(self, text: str, answer: str, term: str | None) -> None:
        assert [*terms_of(question(text, answer), 1), None][0] == term

    def test_a_text_without_turns_has_terms(self) -> None:
        assert terms_of(Record((), "We met Ada Lovelace. Then Ada Lovelace left.", ""), 1) == ["Ada Lovelace"]

    def test_overlapping_terms_are_one_name(self) -> None:
        assert join_overlapping(["B C", "X", "A B", "C D"]) == ["X", "A B C D"]
        assert join_overlapping(["A B", "B A"]) == ["A B A"]  # ends

    def test_a_prompt_has_the_placeholder_for_the_whole_name(self) -> None:
        record = question("Has Ada King Lovelace won a prize?", "Yes, Ada King Lovelace won one.")
        assert prompt_of(record, "{term}") == "Has {term} won a prize?"
        assert prompt_of(question("Who won the prize?", "Ada Lovelace."), "{term}") is None
        assert prompt_of(question("Did Ada Lovelace, or Ada, win?", "Ada Lovelace won."), "{term}") is None
        assert prompt_of(question("Is it Art, an Artist?", "It is Art."), "{term}") == "Is it {term}, an Artist?"
        listed = " and ".join(f"Name{i} Surname{i}" for i in range(2000))
        assert prompt_of(question(f"Who are {listed}?", f"They are {listed}."), "{term}") is None  # at once


class TestTheMechanism:
    @pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-6), (1.0, 1e-6), (4.0, 1e-5), (1.0, 0.05)])
    def test_the_threshold_is_the_lowest(self, epsilon: float, delta: float) -> None:
        """A term that one record has is released if discrete Laplace noise adds what it lacks to the threshold: with
        a probability of at most δ, and of more than δ at the next lower one."""
        mechanism = term_mechanism(TermRelease(dp_epsilon=epsilon, dp_delta=delta))
        noise = stats.dlaplace(epsilon)
        assert mechanism.bound.epsilon == pytest.approx(epsilon)
        assert noise.sf(mechanism.threshold - 2) == pytest.approx(mechanism.bound.delta, rel=1e-6)
        assert noise.sf(mechanism.threshold - 2) <= delta < noise.sf(mechanism.threshold - 3)

    @pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 0.05), (4.0, 1e-3)])
    @pytest.mark.slow
    def test_what_one_record_says_gets_out_as_rarely_as_stated(self, epsilon: float, delta: float) -> None:
        """Over 200,000 terms that one record has each: the rate is the bound's δ, which is below the requested one."""
        mechanism = term_mechanism(TermRelease(dp_epsilon=epsilon, dp_delta=delta))
        count = 200_000
        rate = len(mechanism.measurement({f"term {i}": 1 for i in range(count)})) / count
        error = 5 * math.sqrt(mechanism.bound.delta / count)
        assert rate == pytest.approx(mechanism.bound.delta, abs=error)
        assert mechanism.bound.delta <= delta

    def test_a_large_epsilon_has_the_lowest_threshold(self) -> None:
        assert term_mechanism(TermRelease(dp_epsilon=50.0)).threshold == 2

    def test_more_terms_and_replaced_records_cost_more(self) -> None:
        thresholds = [
            term_mechanism(TermRelease(terms=terms, dp_neighbours=neighbours)).threshold
            for terms, neighbours in ((1, "left-out"), (2, "left-out"), (2, "replaced"))
        ]
        assert thresholds[1] > 1.9 * thresholds[0]
        assert thresholds[2] > 1.9 * thresholds[1]

    def test_a_threshold_that_nothing_reaches_is_refused(self) -> None:
        with pytest.raises(UsageError, match="no threshold"):
            term_mechanism(TermRelease(dp_epsilon=1e-9, terms=100))


class TestTheRelease:
    def test_a_shared_name_is_released_and_a_rare_one_is_not(self) -> None:
        records = [*about("Ada Lovelace", 60), *about("Alan Turing", 2)]
        assert terms_in(records, dp_epsilon=1.0) == [["Ada Lovelace"]]

    @pytest.mark.slow
    def test_one_record_changes_how_often_a_name_is_released_by_no_more_than_epsilon(self) -> None:
        """At the threshold, where it changes most: over many draws, the ratio with and without one record."""
        options = {"dp_epsilon": 1.0, "dp_delta": 1e-3}
        count = term_mechanism(TermRelease(**options)).threshold - 3
        rates = [
            sum(map(bool, terms_in(about("Ada Lovelace", n), DRAWS, **options))) / DRAWS for n in (count, count + 1)
        ]
        error = 4 / math.sqrt(DRAWS * rates[0])
        assert math.e * (1 - error) < rates[1] / rates[0] < math.e * (1 + error)

    @pytest.mark.slow
    def test_the_name_of_one_person_is_never_released_where_persons_are_protected(self) -> None:
        """Sixty records of one are one unit: the threshold needs others who have the same name in theirs."""
        records = about("Ada Lovelace", 60, unit="patient 1")
        assert not any(terms_in(records, 200, dp_epsilon=1.0, dp_unit="patient"))
        shared = [each for n in range(60) for each in about("Ada Lovelace", 2, unit=f"patient {n}")]
        assert terms_in(shared, dp_epsilon=1.0, dp_unit="patient") == [["Ada Lovelace"]]

    def test_a_field_names_what_a_record_is_about(self) -> None:
        release = TermRelease(term_column="subject")
        records = about("Ada Lovelace", 60)
        names = ["Lee Harris"] * 30 + ["James Lee"] * 20 + [None] * 10
        terms, covered = release_terms(records, names, release, term_mechanism(release))
        assert sorted(terms) == ["James Lee", "Lee Harris"]  # two people, who are not joined
        assert covered == 50


class TestAccounting:
    def test_releases_add_up_beside_trainings(self) -> None:
        """Basic composition of (ε, δ), and what it leaves of δ for the trainings."""
        release, mechanism = Release(1.0, 4e-6), Mechanism(2.0, 1.0, 3)
        training_epsilon = composed_epsilon([mechanism], 1e-5 - 8e-6)
        assert composed_epsilon([release, mechanism, release], 1e-5) == pytest.approx(2 + training_epsilon)
        assert composed_epsilon([release, release], 1e-5) == 2
        assert composed_epsilon([release] * 3, 1e-5) == math.inf  # δ is used up
        assert composed_epsilon([release, None], 1e-5) == math.inf

    def test_replacing_a_record_is_leaving_out_two(self) -> None:
        """A release that was bounded for one left out, counted between data sets with one replaced."""
        assert composed_epsilon([Release(1.0, 1e-7)], 1e-5, "replaced") == 2
        assert composed_epsilon([Release(1.0, 1e-7, "replaced")], 1e-5, "replaced") == 1
        assert composed_epsilon([Release(1.0, 3e-6)], 1e-5, "replaced") == math.inf  # (1 + e)·δ

    def test_a_bound_for_records_bounds_nothing_for_persons(self) -> None:
        by_record, by_person = (
            LedgerEntry("a", "", 0, 0, "", "surrogate", 9, release=Release(1.0, 1e-6), unit=unit)
            for unit in (None, "patient")
        )
        assert epsilon_of([by_record, by_person], 1e-5) == 2
        assert epsilon_of([by_person], 1e-5, unit="patient") == 1
        assert epsilon_of([by_record, by_person], 1e-5, unit="patient") == math.inf
