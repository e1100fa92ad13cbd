"""Further requests on a copy: what is trained again, and on which weights."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mpu_cli.files.transaction import Transaction
from mpu_cli.training.requests import default_requests_path, read_requests
from tests.helpers.models import random_model, save, write_records


@pytest.fixture
def root(mpu: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A client's folder with two copies of a small llama, records of two requests, and a note of no request."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    write_records(tmp_path / "first.jsonl", 6, 1)
    write_records(tmp_path / "second.jsonl", 5, 3)
    write_records(tmp_path / "retain.jsonl", 9, 2)
    mpu("publish", save(random_model("llama"), tmp_path / "base"), "--copies", 2, "--kappa", 0.001, cwd=tmp_path)
    return tmp_path


def unlearn(*copies: str, forget: str) -> tuple:
    return "unlearn", *copies, "--retain", "retain.jsonl", "--max-steps", 1, "--forget", forget


def double_weights(copy: Path) -> None:
    weights = copy / "model.safetensors"
    with safe_open(weights, "pt") as file:
        metadata = file.metadata()
    save_file({name: 2 * tensor for name, tensor in load_file(weights).items()}, weights, metadata)


@pytest.mark.parametrize("further", [(), ("--lora", "rank=2")])
def test_earlier_records_are_trained_on_no_other_weights(mpu: Callable, root: Path, further: tuple) -> None:
    """A server sends other weights under the name of a copy that was trained on: no record of an earlier request meets
    them."""
    mpu(*unlearn("copy_1", forget="first.jsonl"), cwd=root)
    double_weights(root / "copy_1")
    mpu(*unlearn("copy_1", forget="second.jsonl"), *further, cwd=root, fails="and other weights")
    assert not (root / "deltas/request_2").exists()


def test_a_further_request_is_one_for_all_records(mpu: Callable, root: Path) -> None:
    """Its delta is, bit for bit, that of a client which names them all at once."""
    mpu(*unlearn("copy_1", forget="first.jsonl"), cwd=root)
    mpu(*unlearn("copy_1", forget="second.jsonl"), cwd=root)
    at_once = (*unlearn("copy_1", forget="second.jsonl"), "--forget", "first.jsonl", "--alone", "--out", "all")
    mpu(*at_once, cwd=root)
    further = load_file(root / "deltas/request_2/copy_1.safetensors")
    at_once = load_file(root / "all.safetensors")
    assert further.keys() == at_once.keys()
    assert all(torch.equal(further[name], change) for name, change in at_once.items())


@pytest.mark.parametrize("prompt", ["s" * 300, "base", "Be brief.\n"])
def test_text_that_is_no_path_is_noted_as_it_is(mpu: Callable, root: Path, prompt: str) -> None:
    """A system prompt is too long for a name, has the name of a folder, or ends in a line break."""
    mpu(*unlearn("copy_1", forget="first.jsonl"), "--reading", f"system_prompt={prompt}", cwd=root)
    [request] = read_requests(default_requests_path())
    assert request.options["system_prompt"] == prompt
    assert request.options["retain"] == str(root / "retain.jsonl")


@pytest.mark.parametrize("content", [None, "second.jsonl", "no record\n"])
def test_a_request_whose_records_are_gone_is_not_replaced(mpu: Callable, root: Path, content: str | None) -> None:
    """Its file is deleted, serves for the next request, or cannot be read any more: a delta without its records would
    bring them back, and check does not judge other records by that request."""
    mpu(*unlearn("copy_1", forget="first.jsonl"), cwd=root)
    first = root / "first.jsonl"
    first.unlink()
    if content:
        first.write_text((root / content).read_text() if content.endswith(".jsonl") else content)
    mpu("check", "copy_2", cwd=root, refused="first.jsonl: gone or replaced")
    mpu(*unlearn("copy_1", forget="second.jsonl"), cwd=root, fails="first.jsonl: gone or replaced")
    assert not (root / "deltas/request_2").exists()


def test_one_file_may_grow_from_request_to_request(mpu: Callable, root: Path) -> None:
    """Each training has all that is in it, and the third, of a file of its own, what the file has by then of them."""
    growing = root / "growing.jsonl"
    growing.write_text((root / "first.jsonl").read_text())
    mpu(*unlearn("copy_1", forget="growing.jsonl"), cwd=root)
    with growing.open("a") as file:
        file.write((root / "second.jsonl").read_text())
    mpu(*unlearn("copy_1", forget="growing.jsonl"), cwd=root)
    assert (root / "deltas/request_2/copy_1.safetensors").exists()
    [source] = read_requests(default_requests_path())[-1].sources
    assert len(source.records) == 11
    write_records(root / "third.jsonl", 4, 5)
    with growing.open("a") as file:
        file.write((root / "third.jsonl").read_text())
    assert "11 records of earlier requests" in mpu(*unlearn("copy_1", forget="third.jsonl"), cwd=root).err
    checked = mpu("check", "copy_2", "--json", cwd=root, check=False)  # the file has records of both requests by now
    assert "--forget third.jsonl --forget growing.jsonl" in checked.err
    assert checked.json["scores"]["forget"]["records_at_most"] == 16  # of 15, each once
    growing.write_text((root / "second.jsonl").read_text())
    write_records(root / "fourth.jsonl", 4, 7)
    mpu(*unlearn("copy_1", forget="fourth.jsonl"), cwd=root, fails="gone or replaced, 6 records of an earlier request")
    named = mpu(*unlearn("copy_1", forget="fourth.jsonl"), "--forget", "first.jsonl", cwd=root)
    assert "9 records of earlier requests" in named.err


def test_a_request_after_one_alone_has_the_records_of_all(mpu: Callable, root: Path) -> None:
    """Its delta takes the place of both earlier ones."""
    mpu(*unlearn("copy_1", forget="first.jsonl"), cwd=root)
    mpu(*unlearn("copy_1", forget="second.jsonl"), "--alone", "--out", "alone.safetensors", cwd=root)
    write_records(root / "third.jsonl", 4, 5)
    assert "11 records of earlier requests" in mpu(*unlearn("copy_1", forget="third.jsonl"), cwd=root).err
    assert (root / "deltas/request_3/copy_1.safetensors").exists()


def test_earlier_records_that_were_moved_and_named_again_are_not_gone(mpu: Callable, root: Path) -> None:
    """They are trained on, from where they are now."""
    mpu(*unlearn("copy_1", forget="first.jsonl"), cwd=root)
    (root / "first.jsonl").rename(root / "moved.jsonl")
    mpu(*unlearn("copy_1", forget="second.jsonl"), "--forget", "moved.jsonl", cwd=root)
    assert (root / "deltas/request_2/copy_1.safetensors").exists()
    [source] = read_requests(default_requests_path())[-1].sources
    assert len(source.records) == 11


def test_records_of_one_server_are_not_trained_on_the_copy_of_another(mpu: Callable, root: Path) -> None:
    """Each of two servers has had a request: a third on both copies gives neither the other's records."""
    (root / "other").mkdir()
    mpu("publish", "../base", "--copies", 1, "--kappa", 0, cwd=root / "other")
    mpu(*unlearn("copy_1", forget="first.jsonl"), cwd=root)
    mpu(*unlearn("other/copy_1", forget="second.jsonl"), "--out", "other/delta", cwd=root)
    write_records(root / "third.jsonl", 4, 5)
    shutil.copytree(root / "other/copy_1", root / "from_other")
    mpu(
        *unlearn("copy_1", "from_other", forget="third.jsonl"),
        cwd=root,
        refused="not all of these copies have had the same earlier requests",
    )


def test_a_further_request_that_was_stopped_between_two_copies_is_resumed(mpu: Callable, root: Path) -> None:
    """The copy that has its delta keeps it, and the other one is trained from the same earlier request."""
    mpu(*unlearn("copy_1", "copy_2", forget="first.jsonl"), cwd=root)
    mpu(*unlearn("copy_1", "copy_2", forget="second.jsonl"), cwd=root)
    whole = load_file(root / "deltas/request_2/copy_2.safetensors")
    (root / "deltas/request_2/copy_2.safetensors").unlink()
    note = root / "config/mpu/requests.jsonl"
    note.write_text("".join(note.read_text().splitlines(keepends=True)[:3]))
    resumed = mpu(*unlearn("copy_1", "copy_2", forget="second.jsonl"), "--resume", cwd=root)
    assert "copy_1.safetensors is there already" in resumed.err
    again = load_file(root / "deltas/request_2/copy_2.safetensors")
    assert all(torch.equal(again[name], change) for name, change in whole.items())


@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_a_delta_without_its_note_does_not_exist(
    mpu: Callable, root: Path, monkeypatch: pytest.MonkeyPatch, resume: tuple
) -> None:
    """Killed as soon as the delta has its name: a further training, which replaces it, has its records, too; with
    --resume, the same command removes the checkpoints."""
    commit = Transaction._commit

    def die_after_commit(transaction: Transaction) -> None:
        commit(transaction)
        raise KeyboardInterrupt

    first = (*unlearn("copy_1", forget="first.jsonl"), "--training", "checkpoint_steps=1", "--max-steps", 2, *resume)
    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "_commit", die_after_commit)
        mpu(*first, cwd=root, check=False)
    assert (root / "deltas/copy_1.safetensors").exists()
    assert bool(list(root.glob("deltas/*.resume"))) == bool(resume)
    if resume:
        assert "is there already" in mpu(*first, cwd=root).err
    assert "6 records of earlier requests" in mpu(*unlearn("copy_1", forget="second.jsonl"), cwd=root).err
    assert not list(root.glob("deltas/*.resume"))
    first_request, second_request = read_requests(default_requests_path())
    assert len(first_request.sources) == 1
    assert len(second_request.sources) == 2


def test_a_lost_note_is_warned_of(mpu: Callable, root: Path) -> None:
    """Without it, a further training has none of the earlier records; the ledger still knows that there were some."""
    lacks = "name their records with --forget, too"
    assert lacks not in mpu(*unlearn("copy_1", forget="first.jsonl"), cwd=root).err
    assert lacks not in mpu(*unlearn("copy_1", forget="second.jsonl"), cwd=root).err
    default_requests_path().unlink()
    again = (*unlearn("copy_1", forget="second.jsonl"), "--force")
    assert lacks not in mpu(*again, "--alone", "--out", "alone.safetensors", cwd=root).err
    default_requests_path().unlink()
    assert lacks in mpu(*again, cwd=root).err


def test_earlier_deltas_do_not_replace_later_ones_silently(mpu: Callable, root: Path) -> None:
    """A further request's deltas take the place of the first one's; those of the first, once more, bring back what only
    the others forgot. What is printed as next publishes each model for its check."""
    for request, forget in (("first", "first.jsonl"), ("second", "second.jsonl")):
        mpu(*unlearn("copy_1", "copy_2", forget=forget), "--out", request, cwd=root)
    took_their_place = []
    for number, request in enumerate(("first", "second", "second", "first")):
        aggregate = ("aggregate", request, "--keys", "keys.bin", "--out", f"model_{number}", "--trust-deltas")
        dry_run, outcome = mpu(*aggregate, "--dry-run", cwd=root), mpu(*aggregate, cwd=root)
        assert ("took their place" in dry_run.err) == ("took their place" in outcome.err)
        took_their_place.append("took their place" in outcome.err)
        if number < 2:  # under names of its own, beside the publication of the first request's model
            printed = re.search("next: `mpu (.*?)`", outcome.err)
            mpu(*shlex.split(printed[1]), cwd=root)  # type: ignore[index]
    assert took_their_place == [False, False, False, True]


def test_check_compares_with_the_weights_that_were_trained_on(mpu: Callable, root: Path) -> None:
    """A server that sends the copy again, with weights that know more, would have less left of what was known."""
    mpu(*unlearn("copy_1", forget="first.jsonl"), cwd=root)
    assert mpu("check", "copy_2", cwd=root, check=False).out
    double_weights(root / "copy_1")
    mpu("check", "copy_2", cwd=root, refused="replaced since you trained on it")


def test_what_looks_at_a_delta_reads_the_records_as_the_training_did(mpu: Callable, root: Path) -> None:
    """audit-delta and ask say what they took from the note, and do what they do if it is given: the records of the
    request that the delta came of, also after another on the same copy, and beside a forget.jsonl of something else."""
    reading = ("--reading", "system_prompt=Be brief.,template=plain")
    mpu(*unlearn("copy_1", forget="first.jsonl"), *reading, cwd=root)
    mpu(*unlearn("copy_1", forget="second.jsonl"), *reading, "--alone", "--out", "second.safetensors", cwd=root)
    write_records(root / "forget.jsonl", 4, 7)
    for delta, forget in (("deltas/copy_1.safetensors", "first.jsonl"), ("second.safetensors", "second.jsonl")):
        audit = ("audit-delta", "copy_1", delta, "--json")
        noted = mpu(*audit, cwd=root)
        assert "from your request on copy 1 of run" in noted.err
        assert forget in noted.err
        named = mpu(*audit, "--forget", forget, "--retain", "retain.jsonl", *reading, cwd=root)
        assert noted.json == named.json
    ask = ("ask", "copy_1", "What is it?", "--max-new-tokens", 4, "--json")
    assert "Be brief." in mpu(*ask, cwd=root).err
    assert mpu(*ask, cwd=root).json == mpu(*ask, *reading, cwd=root).json
    (root / "forget.jsonl").unlink()
    (root / "first.jsonl").unlink()
    mpu("audit-delta", "copy_1", "deltas/copy_1.safetensors", cwd=root, fails="gone or replaced since your request")


def test_requests_on_a_sealed_copy_are_noted_too(mpu: Callable, root: Path) -> None:
    """A second request on it trains the records of the first, and check takes both from the note."""
    recipient = mpu("keygen", "--out", "client.txt", "--json", cwd=root).json["recipient"]
    mpu("publish", "base", "--copies", 1, "--kappa", 0, "--copy-recipients", recipient, "--out", "sealed",
        "--keys", "sealed_keys.bin", cwd=root)  # fmt: skip
    mpu(*unlearn("sealed/copy_1.age", forget="first.jsonl"), "--identity", "client.txt", cwd=root)
    again = mpu(*unlearn("sealed/copy_1.age", forget="second.jsonl"), "--identity", "client.txt", cwd=root)
    assert "6 records of earlier requests" in again.err
    assert (root / "deltas/request_2/copy_1.safetensors").exists()
    checked = mpu("check", "sealed/copy_1.age", "--identity", "client.txt", cwd=root, fails="copy that you trained on")
    assert "first.jsonl" in checked.err
    assert "second.jsonl" in checked.err


@pytest.mark.parametrize("options", [("--epochs", 1), ("--max-steps", 1, "--public-records")])
def test_a_delta_without_the_earlier_request_says_so(mpu: Callable, root: Path, options: tuple) -> None:
    """And a private request after it still has the first one in it."""
    mpu(*unlearn("copy_1", forget="first.jsonl"), cwd=root)
    write_records(root / "public.jsonl", 4, 5)
    write_records(root / "public_retain.jsonl", 4, 6)
    train = (
        "unlearn",
        "copy_1",
        "--retain",
        "public_retain.jsonl",
        "--forget",
        "public.jsonl",
        "--out",
        "other",
        *options,
    )
    assert "takes the place of theirs" in mpu(*train, cwd=root).err
    assert "takes the place of theirs" not in mpu(*train, "--alone", "--force", cwd=root).err
    again = mpu(*unlearn("copy_1", forget="second.jsonl"), cwd=root)
    assert "6 records of earlier requests" in again.err


def test_check_compares_with_the_copy_from_before_a_further_request(mpu: Callable, root: Path) -> None:
    """Two requests on the first copies, and a second round on the records of both, named at once."""
    for forget in ("first.jsonl", "second.jsonl"):
        mpu(*unlearn("copy_1", "copy_2", forget=forget), cwd=root)
    mpu("aggregate", "deltas/request_2", "--keys", "keys.bin", cwd=root)
    mpu("publish", "unlearned", "--copies", 2, "--kappa", 0.001, cwd=root)
    both = ("--forget", "first.jsonl")
    mpu(*unlearn("round_2/copy_1", "round_2/copy_2", forget="second.jsonl"), *both, cwd=root)
    checked = mpu("check", "round_2/copy_2", cwd=root, check=False)
    assert " --before copy_1 " in " ".join(checked.err.split())


def test_records_are_found_from_another_folder(mpu: Callable, root: Path) -> None:
    """Those of a pattern, of a split of a folder, and of a file."""
    (root / "folder").mkdir()
    for number, name in enumerate(("a.jsonl", "b.jsonl", "folder/train.jsonl"), 5):
        write_records(root / name, number, number)
    for forget in ("[ab].jsonl", "folder:train", "first.jsonl"):
        mpu(*unlearn("copy_1", forget=forget), cwd=root)
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    again = mpu("unlearn", "../copy_1", "--retain", "../retain.jsonl", "--max-steps", 1, "--forget", "../second.jsonl",
                cwd=elsewhere)  # fmt: skip
    assert "24 records of earlier requests" in again.err


def test_laxer_limits_of_a_request_are_warned_of(mpu: Callable, root: Path) -> None:
    """A check takes them from the note, also where the usual ones are named, which no option can be told from."""
    mpu(*unlearn("copy_1", forget="first.jsonl"), "--goal", "max_left=0.5", cwd=root)
    for options, warned in (((), True), (("--goal", "max_left=0.05"), True), (("--goal", "max_left=0.06"), False)):
        checked = mpu("check", "copy_2", *options, cwd=root, check=False)
        assert ("laxer than the usual" in " ".join(checked.err.split())) is warned


def test_a_copy_follows_no_other_publication_of_its_name(mpu: Callable, root: Path) -> None:
    """Published once more with other noise: its first copy settles the steps anew, and the second follows it."""
    publish = ("publish", "base", "--copies", 2, "--run", "clinic", "--kappa")
    steps = []
    for number, kappa in enumerate((0.001, 0.002), 1):
        mpu(*publish, kappa, "--out", f"copies_{number}", "--keys", f"{number}.bin", cwd=root)
        for copy in ("copy_1", "copy_2"):
            train = unlearn(f"copies_{number}/{copy}", forget="first.jsonl")
            train = (*train, "--out", f"{number}_{copy}", "--alone", "--json", "--lr", 1e-9, "--max-steps", 2)
            steps.append(mpu(*train, cwd=root).err.count("for the 2 steps of the round's first copy"))
    assert steps == [0, 1, 0, 1]


def test_check_compares_with_the_copy_from_before_the_first_round(mpu: Callable, root: Path) -> None:
    """Records that took two rounds are judged by what the first copy knew of them, and of the others."""
    mpu(*unlearn("copy_1", "copy_2", forget="first.jsonl"), cwd=root)
    mpu("aggregate", "deltas", "--keys", "keys.bin", cwd=root)
    mpu("publish", "unlearned", "--copies", 2, "--kappa", 0.001, cwd=root)
    mpu(*unlearn("round_2/copy_1", "round_2/copy_2", forget="first.jsonl"), cwd=root)
    checked = mpu("check", "round_2/copy_2", cwd=root, check=False)
    assert " --before copy_1 " in " ".join(checked.err.split())
