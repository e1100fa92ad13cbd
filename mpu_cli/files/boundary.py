"""Files that another party may have made: opened if they are regular files, read up to a limit, copied into private
folders.

What a user names on the command line is trusted to be what was meant, links included. What lies inside a folder is not:
a name in there could lead anywhere on this machine.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import stat
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, TypeVar

import msgspec
from msgspec import Meta, ValidationError

from mpu_cli.errors import MpuError, first_line

MAX_SMALL_FILE = 4 << 20  # bytes of a config or a manifest: a thousand times a real one
LARGEST_TOKENIZER = 64 << 20  # bytes of a file that tokenizers parses
AGE_HEADER = b"age-encryption.org/v1\n"  # first bytes of a sealed file
BLOCK = 1 << 20
LONGEST_STEM = 200  # bytes of a name in a longer one
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
GET_IT_AGAIN = "get it again, as files and folders without links"


def open_regular(path: Path, *, links: bool = True) -> BinaryIO:
    """Open ``path`` for reading if it is a regular file; without ``links``, only if it is not a link either.

    Links of the Hub's cache, from a snapshot to its blobs, count as files. Never waits for a FIFO or a device.
    Raises MpuError.
    """
    if links:
        return _open(path, path, 0)
    path = _blob(path) or path
    return _open(path, path, os.O_NOFOLLOW)


def open_inside(folder: int, name: str, where: Path) -> BinaryIO:
    """``open_regular`` for the entry ``name`` of an open directory; ``where`` is what messages call it."""
    return _open(name, where, os.O_NOFOLLOW, folder)


def unreadable(path: Path, error: OSError) -> MpuError:
    """The error for a file that could not be opened."""
    if error.errno == errno.ELOOP:
        return MpuError(f"{path}: is a link, which could lead to any file here, so it is not followed", GET_IT_AGAIN)
    return MpuError(f"{path}: cannot be read: {error.strerror}")


def _open(name: str | Path, where: Path, flags: int, folder: int | None = None) -> BinaryIO:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=folder)
    except OSError as error:
        raise unreadable(where, error) from error
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise MpuError(f"{where}: not a regular file", GET_IT_AGAIN)
    return file


def _blob(path: Path) -> Path | None:
    """The target of a link of the Hub's cache (``…/snapshots/REVISION/NAME``), if that is a blob of its repository."""
    parents = path.absolute().parents
    snapshots = next((parent for parent in parents if parent.name == "snapshots"), None)
    if snapshots is None or not path.is_symlink():
        return None
    blobs = snapshots.parent / "blobs"
    if blobs.is_symlink() or snapshots.is_symlink():
        return None  # the cache makes neither a link: somebody else did
    blob = path.resolve()
    return blob if blob.parent == blobs.resolve() else None


def read_bounded(path: Path, limit: int = MAX_SMALL_FILE, *, links: bool = True) -> bytes:
    """The bytes of a regular file. Raises MpuError if there are more than ``limit``."""
    with open_regular(path, links=links) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise MpuError(f"{path}: larger than {limit:,} bytes, the most that mpu reads of such a file")
    return content


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add ``path`` to errors of the system that name no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def copy_bounded(source: BinaryIO, target: Path, limit: int) -> int:
    """Copy an open file to the new private file ``target``; the number of bytes. Raises MpuError above ``limit``."""
    copied = 0
    with naming(target), create_private(target) as written:
        while block := source.read(BLOCK):
            copied += len(block)
            if copied > limit:
                raise MpuError(f"{target.name}: larger than {limit:,} bytes, the most that is accepted here")
            written.write(block)
    return copied


def create_private(path: Path) -> BinaryIO:
    """A new file that only its owner may read, open for writing. FileExistsError if there is anything of that name."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, PRIVATE_FILE)
    os.fchmod(descriptor, PRIVATE_FILE)  # whatever the umask left out
    return os.fdopen(descriptor, "wb")


def private_folder(path: Path) -> Path:
    """``path`` as a directory that only its owner may enter; missing parents are made so, too.

    Raises MpuError if it is a link, or belongs to somebody else.
    """
    # mkdir(parents=True) would give the mode to the last folder only.
    for folder in reversed([path, *path.parents]):
        with contextlib.suppress(FileExistsError):
            if not folder.exists():
                folder.mkdir(mode=PRIVATE_FOLDER)
    status = path.stat(follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid():
        raise MpuError(f"{path}: must be a folder of your own, not a link or another user's", "choose another folder")
    path.chmod(PRIVATE_FOLDER)
    return path


@contextmanager
def private_scratch() -> Iterator[Path]:
    """A new private folder among the system's temporary files, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="mpu-") as scratch:
        yield Path(scratch)


@contextmanager
def private_umask() -> Iterator[None]:
    """Whatever is created inside, also by libraries, is for its owner only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def current_umask() -> int:
    # No call reads it without setting it.
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync_folder(path: Path) -> None:
    """Flush the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def short_name(name: str) -> str:
    """``name`` with room for what is put around it: file systems allow 255 bytes. Of a long one its beginning, and a
    digest of all."""
    content = os.fsencode(name)
    if len(content) <= LONGEST_STEM:
        return name
    beginning = content[: LONGEST_STEM - 17].decode(errors="ignore")
    return f"{beginning}-{hashlib.sha256(content).hexdigest()[:16]}"


def random_name(name: str) -> str:
    """A hidden name that nobody can have prepared, for writing what becomes ``name``."""
    return f".{short_name(name)}.{secrets.token_hex(8)}.partial"


# JSON documents that come from outside, read by a schema. What does not fit is refused, with an error of one line.
#
# A schema is a ``Document`` or a dataclass. Its fields say types and bounds, with the kinds of value below; a field
# that may be missing has a default. Entries without a field are ignored, as older and newer versions of mpu write
# others.
#
#     class Point(Document):
#         x: Count
#     parse_document(Point, {"x": 1}, "point.json")    gives Point(x=1)
#     parse_document(Point, {"x": "1"}, "point.json")  raises MpuError("point.json: x: expected int, got str")

MAX_FACTS = 20  # entries of a small table
MAX_LAYERS = 10_000
MAX_MESSAGE = 200  # characters of a message

Text = Annotated[str, Meta(max_length=10_000)]
Word = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]{1,80}\Z")]
Seed = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
# A run's name is printed: no control characters, line separators, changes of direction or unpaired surrogates.
RunName = Annotated[
    str, Meta(max_length=200, pattern=r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]*\Z")
]
Count = Annotated[int, Meta(ge=1, le=10**6)]
Scale = Annotated[float, Meta(ge=0, le=1e300)]
Above0 = Annotated[float, Meta(gt=0, le=1e300)]
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
Numbers = Annotated[dict[Word, Finite], Meta(max_length=MAX_FACTS)]
Words = Annotated[dict[Word, Word], Meta(max_length=MAX_FACTS)]


class Document(msgspec.Struct, kw_only=True):
    """The schema of a JSON object."""


Schema = TypeVar("Schema")


def parse_document(schema: type[Schema], value: object, where: object, hint: str = "get it again") -> Schema:
    """``value``, a part of a JSON document, by its schema. Raises MpuError, with ``where``, if it does not fit."""
    try:
        return msgspec.convert(value, schema, strict=True)
    except (ValidationError, ValueError, RecursionError) as error:
        raise MpuError(f"{where}: {_in_words(error)}", hint) from error


def read_document(
    schema: type[Schema], path: Path, hint: str = "get it again", *, limit: int = MAX_SMALL_FILE, links: bool = True
) -> Schema:
    """The JSON object in a file of at most ``limit`` bytes, by its schema. Raises MpuError, also for what parsers read
    differently: an object that has a name twice, NaN and infinity."""
    value = read_json_object(path, limit, links=links, strict=True)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half a character, which could not be written again
        raise MpuError(f"{path}: holds text that is not Unicode", hint) from error
    return parse_document(schema, value, path, hint)


def read_json_object(
    path: Path, limit: int = MAX_SMALL_FILE, *, links: bool = True, strict: bool = False
) -> dict[str, object]:
    """The JSON object in a regular file of at most ``limit`` bytes. Raises MpuError if there is none or, if ``strict``,
    an object has a name twice or a number is NaN or infinite."""
    content = read_bounded(path, limit, links=links)
    try:
        if strict:
            value = json.loads(content, object_pairs_hook=once_each, parse_constant=_no_number)
        else:
            value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise MpuError(f"{path}: not JSON ({first_line(error)})") from error
    if not isinstance(value, dict):
        raise MpuError(f"{path}: not a JSON object")
    return value


class RepeatedName(ValueError):
    """A JSON object has one name twice."""


def once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The entries of a JSON object, as json's ``object_pairs_hook``. Raises RepeatedName: json alone would keep the
    last of two that have one name, and other parsers the first."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise RepeatedName(f"an object with {repeated([name for name, _ in pairs])!r} twice")
    return entries


def repeated(names: Iterable[str]) -> str | None:
    """The first of ``names`` that was there before, in one pass: there may be a million."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def as_entries(document: Document) -> dict[str, object]:
    """The inverse of ``parse_document``: its entries in JSON."""
    entries = msgspec.to_builtins(document)
    assert isinstance(entries, dict)
    return entries


def _in_words(error: Exception) -> str:
    """msgspec's message with the place first: "round: expected int, got str"."""
    reason, _, location = first_line(error).replace("`", "").partition(" - at ")
    location = re.sub(r"^(key in )?\$\.?", r"\1", location)
    reason = reason[:1].lower() + reason[1:]
    if " matching regex " in reason:  # which nobody can read
        reason = "not of the form that it must have"
    message = f"{location}: {reason}" if location else reason
    return "".join(character for character in message[:MAX_MESSAGE] if character.isprintable())


# The names that ``files.folder`` lets through, file by file.
#
# CONFIG: the fields of transformers' config classes of the supported families (tests/files/test_boundary.py
# compares), without those that name labels. None of them makes a library read, fetch or run something.


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


CONFIG = _names(
    """
    _pad_token_id _remove_final_layer_norm _sliding_window_pattern activation
    activation_dropout activation_function activation_sparsity_pattern
    add_cross_attention alibi alibi_bias_max altup_active_idx altup_coef_clip altup_correct_scale
    altup_num_inputs apply_residual_connection_post_layernorm architectures attention_bias
    attention_chunk_size attention_context_left attention_context_right attention_dropout
    attention_in_multiplier attention_invalid_logits_value attention_k_eq_v attention_layers
    attention_logit_cap attention_multiplier attention_out_bias attention_out_multiplier
    attention_probs_dropout_prob attention_softmax_in_fp32 attention_types attn_config attn_impl
    attn_layer_indices attn_layer_offset attn_layer_period attn_logit_softcapping attn_pdrop attn_scale
    attn_temperature_tuning attn_type attn_uses_sequence_id audio_config audio_embed_dim audio_token_id bias
    block_auto_adjust_ff_dim block_ff_dim block_ffn_dim_multiplier block_multiple_of boa_token_id boi_token_id
    boi_token_index bos_token_id chunk_size chunk_size_feed_forward classifier_dropout clip_qkv conv_L_cache
    conv_bias conv_kernel conv_kernel_size d_model decoder_sparse_step deepstack_visual_indexes depth
    dim_model_base do_layer_norm_before dropout dtype emb_pdrop embd_pdrop embed_dim embed_dropout
    embedding_dropout embedding_fraction embedding_initializer_range embedding_multiplier enable_bias
    enable_moe_block enable_moe_fp32_combine eoa_token_index eod_token_id eoi_token_id eoi_token_index
    eos_token_id expand expansion_ratio expert_layer_offset expert_layer_period expert_selection_fn ffn_dim
    ffn_hidden_size final_logit_softcapping first_k_dense_replace floor_scale full_attention_interval
    full_attn_idxs fullatt_block_indexes gating global_attn_every_n_layers global_head_dim gradient_clipping
    head_dim hidden_act hidden_activation hidden_dropout hidden_dropout_prob hidden_size
    hidden_size_per_layer_input hybrid_override_pattern image_seq_length image_size image_token_id
    image_token_index in_channels index_head_dim index_n_heads index_skip_topk_offset index_topk
    index_topk_freq index_topk_pattern indexer_types init_device init_std initializer_range input_jitter_noise
    interleave_moe_layer_step intermediate_size intermediate_size_mlp is_decoder is_encoder_decoder
    key_multiplier kv_lora_rank laurel_rank layer_norm_elementwise_affine layer_norm_eps layer_norm_epsilon
    layer_rope_theta layer_types layerdrop layers_block_type learned_pos_emb linear_conv_kernel_dim
    linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim lm_head_bias
    lm_head_multiplier logit_scale logits_scaling mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head
    mamba_d_ssm mamba_d_state mamba_dt_rank mamba_expand mamba_head_dim mamba_hidden_act mamba_n_groups
    mamba_n_heads mamba_norm_before_gate mamba_num_heads mamba_proj_bias mamba_rms_norm mamba_ssm_cache_dtype
    max_position_embeddings max_seq_len max_window_layers merge_size mlp_bias mlp_hidden_act mlp_layer_types
    mlp_multipliers mlp_only_layers mlp_ratio mm_embed_dim mm_posemb_size mm_tokens_per_image model_type
    moe_apply_router_weight_on_input moe_intermediate_size moe_k moe_latent_size moe_layer_end_index
    moe_layer_interval moe_layer_start_index moe_layers moe_norm_min moe_num_experts moe_num_shared_experts
    moe_routed_scaling_factor moe_router_logit_softcapping moe_shared_expert_intermediate_size
    moe_shared_expert_overlap moe_topk mtp_layer_types mtp_layers_block_type mtp_mlp_layer_types
    multi_modal_projector_bias multi_query multimodal_projector_bias mup_enabled n_ctx n_embd n_embed n_group
    n_groups n_head n_heads n_inner n_layer n_layers n_positions n_routed_experts n_shared_experts
    new_decoder_architecture no_bias no_rope_layer_interval no_rope_layers norm_eps norm_epsilon
    norm_topk_prob norm_type num_attention_heads num_attention_heads_per_layer num_channels num_dense_layers
    num_experts num_experts_per_tok num_global_key_value_heads num_heads num_hidden_layers num_key_value_heads
    num_kv_heads num_kv_shared_layers num_layers num_ln_in_parallel_attn num_local_experts num_logits_to_keep
    num_mtp_layers num_nextn_predict_layers num_position_embeddings num_shared_experts
    original_max_position_embeddings out_hidden_size output_hidden_states output_multiplier output_proj_dims
    output_router_logits pad_token_id parallel_attn partial_rotary_factor patch_size patch_temporal
    per_layer_config pixel_shuffle_ratio pooling_kernel_size pos_emb_height pos_emb_width
    position_embedding_size position_embedding_type post_norm_eps prefix_dense_intermediate_size
    prefix_dense_sliding_window_pattern prefix_lm pretraining_tp projection_dim projector_dropout projector_hidden_act
    projector_hidden_size projector_input_dim projector_output_dim projectors_bias q_lora_rank qk_head_dim
    qk_layernorm qk_ln qk_nope_head_dim qk_rope_head_dim qk_scale_factor qkv_bias query_pre_attn_scalar
    reorder_and_upcast_attn rescale_prenorm_residual resid_dropout resid_pdrop residual_dropout
    residual_in_fp32 residual_multiplier residual_weight return_dict rms_norm_eps rope_interleave
    rope_local_base_freq rope_parameters rope_scaling rope_theta rotary_dim rotary_emb_base rotary_pct
    route_scale routed_scaling_factor router_aux_loss_coef router_jitter_noise router_scaling_factor
    scale_attention_softmax_in_fp32 scale_attn_by_inverse_layer_idx scale_attn_weights scale_depth scale_emb
    scale_embedding scale_factor sep_token_id shared_expert_combination_strategy shared_expert_intermediate_size
    shared_intermediate_size sliding_window sliding_window_pattern slow_but_exact softmax_scale
    spatial_merge_size ssm_in_multiplier ssm_multipliers ssm_out_multiplier ssm_state_size standardize
    subsampling_conv_channels summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj swiglu_alpha swiglu_limit temporal_patch_size text_config tie_embedding
    tie_word_embeddings time_step_floor time_step_limit time_step_max time_step_min tokenizer_class
    tokens_per_second top_k_experts topk_group topk_method torch_dtype transformers_version use_associative_scan
    use_attention_gate use_bias use_bidirectional_attention use_cache use_clipped_linears use_conv_bias
    use_double_wide_mlp use_expert_bias use_mamba_kernels use_mambapy use_parallel_residual use_qk_norm
    use_qkv_bias use_sandwich_norm use_sliding_window v_head_dim video_token_id vision_config
    vision_end_token_id vision_feature_layer vision_feature_select_strategy vision_output_dim
    vision_start_token_id vision_use_head vocab_size vocab_size_per_layer_input window_size
    word_embed_proj_dim z_loss_coefficient
    """
)
ROPE = _names(
    """
    alpha attention_factor beta_fast beta_slow chunked_attention compress factor finetuned full_attention
    high_freq_factor linear_attention llama_4_scaling_beta long_factor long_mscale low_freq_factor main
    mrope_interleaved mrope_section mscale mscale_all_dim original_max_position_embeddings
    partial_rotary_factor rope_theta rope_type short_factor short_mscale sliding_attention truncate type
    """
)  # inside rope_parameters and rope_scaling
GENERATION = _names(
    """
    _from_model_config bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id do_sample
    encoder_repetition_penalty eos_token_id epsilon_cutoff eta_cutoff forced_bos_token_id forced_eos_token_id
    length_penalty max_length max_new_tokens min_length min_new_tokens min_p no_repeat_ngram_size num_beams
    output_attentions output_hidden_states pad_token_id renormalize_logits repetition_penalty suppress_tokens
    temperature top_k top_p transformers_version typical_p use_cache
    """
)
GENERATION_TEXTS = _names("stop_strings")
PROCESSOR = _names(
    """
    crop_size data_format default_to_square do_center_crop do_convert_rgb do_image_splitting do_normalize
    do_pad do_pan_and_scan do_rescale do_resize do_sample_frames feature_extractor_type fps height image_mean
    image_processor image_processor_type image_seq_len image_seq_length image_std input_data_format
    interpolation longest_edge max_frames max_height max_image_size max_image_tiles max_patches max_pixels
    max_width merge_size min_frames min_pixels num_frames pad_size pan_and_scan_max_num_crops
    pan_and_scan_min_crop_size pan_and_scan_min_ratio_to_activate patch_size processor_class resample
    rescale_factor shortest_edge size spatial_merge_size temporal_patch_size video_processor_type width
    """
)
TOKENIZER = _names(
    """
    add_bos_token add_dummy_prefix_space add_eos_token add_prefix_space backend clean_up_tokenization_spaces
    do_lower_case errors fix_mistral_regex keep_accents legacy max_length model_input_names model_max_length
    pad_to_multiple_of pad_token_type_id padding_side processor_class remove_space return_token_type_ids
    spaces_between_special_tokens split_special_tokens stride strip_accents tokenizer_class trim_offsets
    truncation_side truncation_strategy use_default_system_prompt use_fast
    """
)  # of which the values are numbers, flags and words
TOKENIZER_TEXTS = _names(
    """
    added_tokens_decoder additional_special_tokens audio_token boi_token bos_token chat_template cls_token
    eoi_token eos_token extra_special_tokens image_token mask_token model_specific_special_tokens pad_token
    sep_token unk_token
    """
)  # of which the values are tokens and templates: any text


# Unpacking a tar archive from another party: one folder of regular files with plain names, bounded, nothing else.
#
# tarfile extracts nothing here: its own filters can be bypassed in some releases of Python (CVE-2025-4517 and
# others). It only decodes headers, 512 bytes at a time; what a member holds is copied by this module.

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
MOST_MEMBERS = 10_000
MOST_BYTES = 16 << 40  # far above any model: in practice, the disk is the limit


def unpack_folder(stream: BinaryIO, into: Path) -> Path:
    """Unpack the archive in ``stream`` into the private directory ``into``; returns its one folder.

    Refused are links, devices, sparse files, extended headers, names that are not plain or come twice, a second
    folder, folders in folders, and truncation. Files get mode 0600 and folders 0700, whatever the archive says.
    Raises MpuError.
    """
    root: Path | None = None
    room = MOST_BYTES
    for _ in range(MOST_MEMBERS):
        member = _header(stream)
        if member is None:
            if root is None:
                raise MpuError("the archive is empty")
            return root
        shown = repr(member.name[:80])
        parts = member.name.rstrip("/").split("/")
        if not all(map(NAME.fullmatch, parts)) or ".." in member.name:
            raise MpuError(f"the archive's member {shown} has a name that is refused")
        if root is None:
            root = into / parts[0]
            root.mkdir(PRIVATE_FOLDER)
        if parts[0] != root.name:
            raise MpuError(f"the archive's member {shown} is outside of its folder {root.name}")
        if member.type == tarfile.DIRTYPE and len(parts) == 1 and member.size == 0:
            continue
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or len(parts) != 2:
            raise MpuError(f"the archive's member {shown} is not a file in its folder")
        if member.size > room:
            raise MpuError(f"the archive holds more than {MOST_BYTES:,} bytes")
        room -= member.size
        try:
            _copy(stream, root / parts[1], member.size)
        except FileExistsError as error:
            raise MpuError(f"the archive's member {shown} comes twice") from error
    raise MpuError(f"the archive holds more than {MOST_MEMBERS:,} members")


def _header(stream: BinaryIO) -> tarfile.TarInfo | None:
    """The next member; None at the end of the archive."""
    raw = _exactly(stream, tarfile.BLOCKSIZE)
    if raw == tarfile.NUL * tarfile.BLOCKSIZE:
        return None
    try:
        member = tarfile.TarInfo.frombuf(raw, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeError) as error:
        raise MpuError(f"the archive has a damaged header ({error})") from error
    if member.size < 0:
        raise MpuError("the archive has a damaged header (negative size)")
    return member


def _copy(stream: BinaryIO, target: Path, size: int) -> None:
    with create_private(target) as file:
        for start in range(0, size, BLOCK):
            file.write(_exactly(stream, min(BLOCK, size - start)))
    # Members are padded to whole blocks.
    _exactly(stream, -size % tarfile.BLOCKSIZE)


def _exactly(stream: BinaryIO, count: int) -> bytes:
    content = b""
    while len(content) < count:
        piece = stream.read(count - len(content))
        if not piece:
            raise MpuError("the archive is truncated")
        content += piece
    return content
