"""The names that ``boundary.cleaning`` lets through, file by file.

CONFIG: the fields of transformers' config classes of the supported families (tests/boundary/test_boundary.py compares),
without those that name labels. None of them makes a library read, fetch or run something.
"""


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
