"""Models of images and sounds."""

from tests.exporters.case import Case, floats, together
from tests.exporters.hub import configuration, ended, small

SOUND = floats(400)


def _image(name: str, model: str, config: str, side: int = 16, **options) -> Case:  # type: ignore[no-untyped-def]
    kind = model if "ForSem" in model else f"{model}ForImageClassification"
    inputs = floats(3, side, side)
    return small(name, kind, config, inputs=inputs, names=("pixel_values",), **options)


IMAGES = (
    _image("vit", "ViT", "VISION"),
    _image("deit", "DeiT", "VISION"),
    _image("beit", "Beit", "VISION use_relative_position_bias=True"),
    _image("dinov2", "Dinov2", "VISION"),
    _image(
        "swin",
        "Swin",
        "image_size=16 patch_size=2 embed_dim=8 depths=[2,1] num_heads=[1,2] window_size=4 "
        "num_labels=4",
    ),
    _image(
        "convnext",
        "ConvNext",
        "num_stages=2 hidden_sizes=[8,12] depths=[1,1] num_labels=4 layer_scale_init_value=0.1",
    ),
    _image(
        "convnextv2", "ConvNextV2", "num_stages=2 hidden_sizes=[8,12] depths=[1,1] num_labels=4"
    ),
    _image("mobilenet-v1", "MobileNetV1", "depth_multiplier=0.25 num_labels=4", 32, folded=False),
    _image("mobilenet-v2", "MobileNetV2", "depth_multiplier=0.25 num_labels=4", 32, folded=False),
    _image(
        "mobilevit",
        "MobileViT",
        "image_size=32 hidden_sizes=[12,16,20] neck_hidden_sizes=[4,8,8,12,16,20,24] "
        "num_attention_heads=2 num_labels=4",
        32,
        folded=False,
    ),
    _image(
        "efficientnet",
        "EfficientNet",
        "width_coefficient=0.25 depth_coefficient=0.25 image_size=32 hidden_dim=320 num_labels=4",
        32,
        folded=False,
    ),
    _image(
        "resnet",
        "ResNet",
        "embedding_size=8 hidden_sizes=[8,12] depths=[1,2] num_labels=4",
        32,
        folded=False,
    ),
    _image(
        "resnet-training",
        "ResNet",
        "embedding_size=8 hidden_sizes=[8,12] depths=[1,2] num_labels=4 layer_type=basic",
        32,
        training=True,
        exporters=("legacy",),
    ),
    _image(
        "regnet",
        "RegNet",
        "embedding_size=8 hidden_sizes=[8,12] depths=[1,1] groups_width=4 num_labels=4",
        32,
        folded=False,
    ),
    _image(
        "segformer",
        "SegformerForSemanticSegmentation",
        "num_encoder_blocks=2 depths=[1,1] sr_ratios=[2,1] hidden_sizes=[8,12] "
        "patch_sizes=[3,3] strides=[2,2] num_attention_heads=[1,2] mlp_ratios=[2,2] "
        "decoder_hidden_size=12 num_labels=4",
        loss="normal",
        folded=False,
    ),
    _image(
        "poolformer",
        "PoolFormer",
        "num_encoder_blocks=2 depths=[1,1] hidden_sizes=[8,12] patch_sizes=[3,3] strides=[2,2] "
        "padding=[1,1] num_labels=4",
    ),
    _image(
        "pvt",
        "Pvt",
        "image_size=16 num_encoder_blocks=2 depths=[1,1] sequence_reduction_ratios=[2,1] "
        "hidden_sizes=[8,12] patch_sizes=[4,2] strides=[4,2] num_attention_heads=[1,2] "
        "mlp_ratios=[2,2] num_labels=4",
    ),
)

SOUNDS = (
    *(
        small(
            name,
            f"{model}ForCTC",
            "SMALL conv_dim=[8,8] conv_stride=[5,4] conv_kernel=[10,4] num_conv_pos_embeddings=4 "
            "num_conv_pos_embedding_groups=2 num_feat_extract_layers=2 pad_token_id=0",
            inputs=SOUND,
            names=("input_values",),
            folded=False,
        )
        for name, model in (("wav2vec2", "Wav2Vec2"), ("hubert", "Hubert"))
    ),
    small(
        "audio-spectrogram",
        "ASTForAudioClassification",
        "hidden_size=16 num_hidden_layers=2 num_attention_heads=2 intermediate_size=24 "
        "num_labels=4 patch_size=4 frequency_stride=4 time_stride=4 max_length=12 num_mel_bins=8",
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
            "text_config": configuration("SMALL eos_token_id=2 pad_token_id=1 bos_token_id=0"),
            "vision_config": configuration("VISION"),
            "projection_dim": 8,
        },
        inputs=together(ended, floats(3, 16, 16)),
        names=("input_ids", "pixel_values"),
        result="logits_per_image",
        refused={"legacy": "fixes the batch size", "dynamo": "that holds the examples"},
    ),
)

CASES = (*IMAGES, *SOUNDS, *BOTH)
