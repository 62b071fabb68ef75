"""Models of images and sounds."""

from tests.exporters.case import Case, floats, together
from tests.exporters.hub import SMALL, ended, small

VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": 4,
}
SOUND = floats(400)


def _image(name: str, model: str, config: dict[str, object], **options) -> Case:  # type: ignore[no-untyped-def]
    inputs = options.pop("inputs", floats(3, 16, 16))
    return small(name, model, config, inputs=inputs, names=("pixel_values",), **options)


IMAGES = (
    _image("vit", "ViTForImageClassification", VISION),
    _image("deit", "DeiTForImageClassification", VISION),
    _image("beit", "BeitForImageClassification", {**VISION, "use_relative_position_bias": True}),
    _image("dinov2", "Dinov2ForImageClassification", VISION),
    _image(
        "swin",
        "SwinForImageClassification",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 1],
            "num_heads": [1, 2],
            "window_size": 4,
            "num_labels": 4,
        },
    ),
    _image(
        "convnext",
        "ConvNextForImageClassification",
        {
            "num_stages": 2,
            "hidden_sizes": [8, 12],
            "depths": [1, 1],
            "num_labels": 4,
            "layer_scale_init_value": 0.1,
        },
    ),
    _image(
        "convnextv2",
        "ConvNextV2ForImageClassification",
        {"num_stages": 2, "hidden_sizes": [8, 12], "depths": [1, 1], "num_labels": 4},
    ),
    _image(
        "mobilenet-v1",
        "MobileNetV1ForImageClassification",
        {"depth_multiplier": 0.25, "num_labels": 4},
        inputs=floats(3, 32, 32),
        folded=False,
    ),
    _image(
        "mobilenet-v2",
        "MobileNetV2ForImageClassification",
        {"depth_multiplier": 0.25, "num_labels": 4},
        inputs=floats(3, 32, 32),
        folded=False,
    ),
    _image(
        "mobilevit",
        "MobileViTForImageClassification",
        {
            "image_size": 32,
            "hidden_sizes": [12, 16, 20],
            "neck_hidden_sizes": [4, 8, 8, 12, 16, 20, 24],
            "num_attention_heads": 2,
            "num_labels": 4,
        },
        inputs=floats(3, 32, 32),
        folded=False,
    ),
    _image(
        "efficientnet",
        "EfficientNetForImageClassification",
        {
            "width_coefficient": 0.25,
            "depth_coefficient": 0.25,
            "image_size": 32,
            "hidden_dim": 320,
            "num_labels": 4,
        },
        inputs=floats(3, 32, 32),
        folded=False,
    ),
    _image(
        "resnet",
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 2], "num_labels": 4},
        inputs=floats(3, 32, 32),
        folded=False,
    ),
    _image(
        "resnet-training",
        "ResNetForImageClassification",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 12],
            "depths": [1, 2],
            "num_labels": 4,
            "layer_type": "basic",
        },
        inputs=floats(3, 32, 32),
        training=True,
        exporters=("legacy",),
    ),
    _image(
        "regnet",
        "RegNetForImageClassification",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 12],
            "depths": [1, 1],
            "groups_width": 4,
            "num_labels": 4,
        },
        inputs=floats(3, 32, 32),
        folded=False,
    ),
    _image(
        "segformer",
        "SegformerForSemanticSegmentation",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 12],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 12,
            "num_labels": 4,
        },
        loss="normal",
        folded=False,
    ),
    _image(
        "poolformer",
        "PoolFormerForImageClassification",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "hidden_sizes": [8, 12],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "padding": [1, 1],
            "num_labels": 4,
        },
    ),
    _image(
        "pvt",
        "PvtForImageClassification",
        {
            "image_size": 16,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sequence_reduction_ratios": [2, 1],
            "hidden_sizes": [8, 12],
            "patch_sizes": [4, 2],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "num_labels": 4,
        },
    ),
)

SOUNDS = (
    small(
        "wav2vec2",
        "Wav2Vec2ForCTC",
        {
            **SMALL,
            "conv_dim": [8, 8],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 4],
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "num_feat_extract_layers": 2,
            "pad_token_id": 0,
        },
        inputs=SOUND,
        names=("input_values",),
        folded=False,
    ),
    small(
        "hubert",
        "HubertForCTC",
        {
            **SMALL,
            "conv_dim": [8, 8],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 4],
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "num_feat_extract_layers": 2,
            "pad_token_id": 0,
        },
        inputs=SOUND,
        names=("input_values",),
        folded=False,
    ),
    small(
        "audio-spectrogram",
        "ASTForAudioClassification",
        {
            **{
                k: VISION[k]
                for k in (
                    "hidden_size",
                    "num_hidden_layers",
                    "num_attention_heads",
                    "intermediate_size",
                    "num_labels",
                )
            },
            "patch_size": 4,
            "frequency_stride": 4,
            "time_stride": 4,
            "max_length": 12,
            "num_mel_bins": 8,
        },
        inputs=floats(12, 8),
        names=("input_values",),
    ),
)

# Each image against the texts of the whole batch.
BOTH = (
    small(
        "clip",
        "CLIPModel",
        {
            "text_config": {**SMALL, "eos_token_id": 2, "pad_token_id": 1, "bos_token_id": 0},
            "vision_config": VISION,
            "projection_dim": 8,
        },
        inputs=together(ended, floats(3, 16, 16)),
        names=("input_ids", "pixel_values"),
        result="logits_per_image",
        refused={"legacy": "fixes the batch size", "dynamo": "that holds the examples"},
    ),
)

CASES = (*IMAGES, *SOUNDS, *BOTH)
