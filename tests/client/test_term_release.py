"""Terms for surrogate records: what one record can do to them, and that the bound is the one that was asked for."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from mpu_cli.client.accounting import Mechanism, Release, composed_epsilon
from mpu_cli.client.term_release import release_terms, term_mechanism
from mpu_cli.errors import UsageError
from mpu_cli.options.surrogates import TermRelease
from mpu_cli.records.record import Record, question
from mpu_cli.records.terms import join_overlapping, prompt_of, terms_of

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
    return [list(release_terms(records, names, release, mechanism).terms) for _ in range(draws)]


class TestTermsOfARecord:
    @pytest.mark.parametrize(
        ("text", "answer", "term"),
        [
            ("Where was Ada Lovelace born?", "Ada Lovelace was born in London.", "Ada Lovelace"),
            ("Has Jean-Luc Ó Briain's book sold?", "Jean-Luc Ó Briain's book sold.", "Jean-Luc Ó"),
            ("What is in it?", "The file is about Acme.", "Acme"),
            ("Кто такой Лев Толстой?", "Лев Толстой писал.", "Лев Толстой"),
            ("who is she", "nobody knows.", None),
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


class TestTheMechanism:
    @pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-6), (1.0, 1e-6), (4.0, 1e-5), (1.0, 0.05)])
    def test_the_threshold_is_the_lowest(self, epsilon: float, delta: float) -> None:
        """A term that one record has is released with the probability that discrete Laplace noise exceeds the
        threshold: at most δ, and more than δ at the next lower one."""
        mechanism = term_mechanism(TermRelease(dp_epsilon=epsilon, dp_delta=delta))
        noise = stats.dlaplace(epsilon)
        assert mechanism.bound.epsilon == pytest.approx(epsilon)
        assert noise.sf(mechanism.threshold - 1) == pytest.approx(mechanism.bound.delta, rel=1e-6)
        assert noise.sf(mechanism.threshold - 1) <= delta < noise.sf(mechanism.threshold - 2)

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

    def test_one_record_changes_how_often_a_name_is_released_by_no_more_than_epsilon(self) -> None:
        """At the threshold, where it changes most: over many draws, the ratio with and without one record."""
        options = {"dp_epsilon": 1.0, "dp_delta": 1e-3}
        count = term_mechanism(TermRelease(**options)).threshold - 3
        rates = [
            sum(map(bool, terms_in(about("Ada Lovelace", n), DRAWS, **options))) / DRAWS for n in (count, count + 1)
        ]
        error = 4 / math.sqrt(DRAWS * rates[0])
        assert math.e * (1 - error) < rates[1] / rates[0] < math.e * (1 + error)

    def test_the_name_of_one_person_is_never_released_where_persons_are_protected(self) -> None:
        """Sixty records of one are one unit: the threshold needs others who have the same name in theirs."""
        records = about("Ada Lovelace", 60, unit="patient 1")
        assert not any(terms_in(records, 200, dp_epsilon=1.0, dp_unit="patient"))
        shared = [each for n in range(60) for each in about("Ada Lovelace", 2, unit=f"patient {n}")]
        assert terms_in(shared, dp_epsilon=1.0, dp_unit="patient") == [["Ada Lovelace"]]

    def test_a_field_names_what_a_record_is_about(self) -> None:
        release = TermRelease(term_column="subject")
        records = about("Ada Lovelace", 60)
        terms = release_terms(records, ["case 7"] * 50 + [None] * 10, release, term_mechanism(release)).terms
        assert list(terms) == ["case 7"]


class TestAccounting:
    def test_releases_add_up_beside_trainings(self) -> None:
        """Basic composition of (ε, δ), and what it leaves of δ for the trainings."""
        release, mechanism = Release(1.0, 4e-6), Mechanism(2.0, 1.0, 3)
        training_epsilon = composed_epsilon([mechanism], 1e-5 - 8e-6)
        assert composed_epsilon([release, mechanism, release], 1e-5) == pytest.approx(2 + training_epsilon)
        assert composed_epsilon([release, release], 1e-5) == 2
        assert composed_epsilon([release] * 3, 1e-5) == math.inf  # δ is used up
        assert composed_epsilon([release, None], 1e-5) == math.inf
