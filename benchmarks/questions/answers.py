"""Which fault's name answers which question, and which ones are true, though not the cause.

Where no rule has a name for the cause, nothing answers the question, and an alarm about something
else is wrong. That nothing is learnt, or that units are dead, is true where it is so.
"""

from __future__ import annotations

DIVERGES = ("lr_too_high", "lr_edge")
FLAT = ("labels_random", "constant_output")
DEAD = (*FLAT, "dead_units", "no_gradient", "lr_too_low")
NAN = ("nonfinite_loss", "nonfinite_gradient")

# The cause, and what is true beside it.
ANSWERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gradients_kept": (("zero_grad_missing",), DIVERGES),
    "scheduler_instead_of_step": (("no_step",), FLAT),
    "schedule_to_zero": (("lr_decayed", "no_step"), ("lr_too_low",)),
    "schedule_by_batch": (("lr_decayed",), ("lr_too_low",)),
    "warmup_never_counts": (("no_step", "lr_too_low"), FLAT),
    "reset_each_epoch": (("optimizer_anew",), ()),
    "rate_too_high": (DIVERGES, DEAD),
    "adam_rate_too_high": (DIVERGES, DEAD),
    "sigmoid_at_small_rate": (("lr_too_low",), (*FLAT, "batch_too_small")),
    "layers_in_a_list": (("unregistered_layers", "optimizer_misses"), ()),
    "left_in_eval_mode": (("batchnorm_eval",), ()),
    "norm_of_one_sample": (("batch_of_one",), ("batch_too_small",)),
    "half_adam_epsilon": (("adam_epsilon", "nonfinite_weights", "precision_underflow"), ()),
    "all_weights_zero": (("symmetric_init",), DEAD),
    "two_layers_zero": (("symmetric_init",), (*DEAD, "vanishing_gradients")),
    "weights_too_large": (("exploding_gradients",), ()),
    "softmax_over_batch": (("softmax_axis", "samples_mixed"), FLAT),
    "maximised": (("loss_maximised",), ()),
    "one_term_left": (("no_gradient",), ()),
    "targets_broadcast": (("loss_broadcast",), FLAT),
    "softmax_before_cross_entropy": (("softmax_twice",), FLAT),
    "sigmoid_before_logits_loss": (("softmax_twice",), FLAT),
    "nll_of_probabilities": (("loss_of_scores",), FLAT),
    "divergence_of_probabilities": (("loss_of_scores",), FLAT),
    "masks_up_to_255": (("target_scale",), ()),
    "triplets_collapse": (DIVERGES, DEAD),
    "rare_pixels": (("class_imbalance",), FLAT),
    "divergence_outweighs": ((), FLAT),
    "actor_without_minus": ((), ()),
    "mean_of_log_probabilities": ((), FLAT),
    "value_of_the_end": ((), ()),
    "generator_detached": ((), ()),
    "no_activation": (("no_nonlinearity",), FLAT),
    "relu_at_the_end": (("dead_units",), DEAD),
    "pixels_truncated": (("input_constant",), FLAT),
    "targets_not_scaled": (("target_scale",), (*DIVERGES, *DEAD, *NAN)),
    "sorted_by_class": (("data_order",), ()),
    "labels_before_shuffle": (("labels_random",), ()),
    "raw_features": (("input_scale", "input_offset"), (*DIVERGES, "dead_units")),
    "mixed_scales": (("input_scale",), ("dead_units",)),
    "iterator_made_anew": (("batch_repeated",), ("overfitting",)),
    "one_label_for_all": (("class_imbalance",), ()),
    "samples_mixed_by_view": (("samples_mixed",), FLAT),
    "labels_not_shifted": ((), ()),
    "future_is_seen": ((), ()),
    "attention_over_queries": ((), ()),
    "features_detached": (("frozen_layer", "no_gradient"), ()),
    "convolutions_frozen": (("frozen_layer",), (*FLAT, "no_gradient")),
    "frozen_the_wrong_ones": (("frozen_layer",), (*FLAT, "no_gradient")),
    "decoder_not_in_optimizer": (("optimizer_misses",), FLAT),
    "head_not_appended": (("optimizer_misses",), FLAT),
    "accumulated_not_divided": (("loss_sum",), (*DIVERGES, *NAN, "dead_units")),
    "decay_too_strong": (("weight_decay_high",), FLAT),
    "clipped_to_nothing": (("clipping_always",), ("lr_too_low", *FLAT)),
    "sigmoid_bounds_outputs": (("target_scale",), ("saturated_units",)),
    "no_stop_gradient": (("target_trained",), FLAT),
    "penalty_of_argmax": ((), ()),
    "sigmoid_with_squares": (
        ("saturated_units", "vanishing_gradients"),
        DEAD,
    ),
    "variance_to_zero": (NAN, ()),
    "log_of_zero": (NAN, ()),
    "router_collapses": (("expert_unused",), ("no_gradient",)),
    "weights_too_small_for_depth": (("vanishing_gradients",), DEAD),
    "empty_mask": (NAN[:1], ()),
    "exponential_of_loss": ((*DIVERGES, *NAN), ()),
    "root_of_zero": (NAN[1:], ()),
    "angle_of_equal_vectors": (NAN[1:], ()),
    "fourth_root": (NAN[1:], ()),
    "constant_image": (("nonfinite_input",), ()),
    "pixels_without_data": (("nonfinite_input",), ()),
    "depth_missing": (("nonfinite_target",), ()),
    "attention_all_masked": (NAN[:1], ()),
    # The model is called with the NaN.
    "deviation_of_one_sample": ((*NAN[:1], "nonfinite_input"), ()),
}
