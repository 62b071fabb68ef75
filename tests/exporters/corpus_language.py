"""Language models: encoders, decoders, and both."""

from tests.exporters.case import floats, together, tokens
from tests.exporters.hub import DYNAMO, TEXT, small

ENCODERS = (
    small("bert", "BertForSequenceClassification", "SMALL"),
    small("bert-masked-words", "BertForMaskedLM", "SMALL"),
    small(
        "bert-relative", "BertForSequenceClassification",
        "SMALL position_embedding_type=relative_key"),
    small(
        "distilbert", "DistilBertForSequenceClassification",
        "dim=16 hidden_dim=24 n_layers=2 n_heads=2 vocab_size=31 max_position_embeddings=20"),
    small("roberta", "RobertaForSequenceClassification", "SMALL max_position_embeddings=40"),
    small("albert", "AlbertForSequenceClassification", "SMALL embedding_size=8"),
    small("electra", "ElectraForSequenceClassification", "SMALL embedding_size=8"),
    small(
        "deberta", "DebertaV2ForSequenceClassification",
        'SMALL relative_attention=True pos_att_type=["p2c","c2p"]', folded=False),
    small("mpnet", "MPNetForSequenceClassification", "SMALL"),
    small(
        "funnel", "FunnelForSequenceClassification",
        "vocab_size=31 d_model=16 n_head=2 d_head=8 d_inner=24 block_sizes=[1,1]", folded=False),
    small(
        "modernbert", "ModernBertForSequenceClassification",
        "SMALL pad_token_id=0 bos_token_id=1 eos_token_id=2 cls_token_id=1 sep_token_id=2"),
)  # fmt: skip

DECODERS = (
    small(
        "gpt2", "GPT2LMHeadModel",
        "n_embd=16 n_layer=2 n_head=2 vocab_size=31 n_positions=20 use_cache=False",
        exporters=DYNAMO),
    small(
        "gpt-neo",
        "GPTNeoForCausalLM",
        "hidden_size=16 num_layers=2 num_heads=2 vocab_size=31 max_position_embeddings=20 "
        'attention_types=[[["global","local"],1]] window_size=3 use_cache=False',
        exporters=DYNAMO,
    ),
    small(
        "opt",
        "OPTForCausalLM",
        "hidden_size=16 num_hidden_layers=2 num_attention_heads=2 ffn_dim=24 vocab_size=31 "
        "max_position_embeddings=20 word_embed_proj_dim=16 use_cache=False",
    ),
    small("llama", "LlamaForCausalLM", "DECODER", exporters=DYNAMO),
    small("mistral", "MistralForCausalLM", "DECODER sliding_window=3", exporters=DYNAMO),
    small("qwen2", "Qwen2ForCausalLM", "DECODER tie_word_embeddings=True", exporters=DYNAMO),
    small("qwen3", "Qwen3ForCausalLM", "DECODER head_dim=8", exporters=DYNAMO),
    small("gemma", "GemmaForCausalLM", "DECODER head_dim=8", folded=False, exporters=DYNAMO),
    small("phi", "PhiForCausalLM", "DECODER", exporters=DYNAMO),
    small(
        "falcon", "FalconForCausalLM",
        "hidden_size=16 num_hidden_layers=2 num_attention_heads=2 vocab_size=31 use_cache=False",
        exporters=DYNAMO),
    small(
        "bloom", "BloomForCausalLM",
        "hidden_size=16 n_layer=2 n_head=2 vocab_size=31 use_cache=False"),
    small("gpt-neox", "GPTNeoXForCausalLM", "SMALL use_cache=False", exporters=DYNAMO),
    small(
        "mixtral", "MixtralForCausalLM", "DECODER num_local_experts=3 num_experts_per_tok=2",
        exporters=DYNAMO),
    small(
        "mamba",
        "MambaForCausalLM",
        "hidden_size=8 num_hidden_layers=1 vocab_size=31 state_size=4 time_step_rank=2 "
        "use_cache=False",
        folded=False,
    ),
    small(
        "rwkv", "RwkvForCausalLM",
        "hidden_size=8 num_hidden_layers=2 vocab_size=31 attention_hidden_size=8 use_cache=False",
        folded=False),
)  # fmt: skip

PAIRS = (
    small(
        "t5",
        "T5ForConditionalGeneration",
        "d_model=16 d_kv=8 d_ff=24 num_layers=1 num_heads=2 vocab_size=31 "
        "decoder_start_token_id=0 use_cache=False",
        inputs=together(TEXT, tokens(31, 4, first=3)),
        names=("input_ids", "decoder_input_ids"),
    ),
    small(
        "bart",
        "BartForConditionalGeneration",
        "d_model=16 encoder_layers=1 decoder_layers=1 encoder_attention_heads=2 "
        "decoder_attention_heads=2 encoder_ffn_dim=24 decoder_ffn_dim=24 vocab_size=31 "
        "max_position_embeddings=20 use_cache=False pad_token_id=1 bos_token_id=0 "
        "eos_token_id=2",
        inputs=together(TEXT, tokens(31, 4, first=3)),
        names=("input_ids", "decoder_input_ids"),
    ),
    small(
        "whisper",
        "WhisperForConditionalGeneration",
        "d_model=16 encoder_layers=1 decoder_layers=1 encoder_attention_heads=2 "
        "decoder_attention_heads=2 encoder_ffn_dim=24 decoder_ffn_dim=24 vocab_size=31 "
        "num_mel_bins=8 max_source_positions=10 max_target_positions=12 use_cache=False "
        "pad_token_id=0 bos_token_id=1 eos_token_id=2 decoder_start_token_id=1",
        inputs=together(floats(8, 20), tokens(31, 4, first=3)),
        names=("input_features", "decoder_input_ids"),
        exporters=DYNAMO,
    ),
)

CASES = (*ENCODERS, *DECODERS, *PAIRS)
