# What docs/your_own_model.md does, with Qwen3-0.6B's config.json as the Hub has it, and no weights.
set -e
root=$PWD
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
cd "$folder"
python "$root/estimate.py" init my_fsdp.py --from fsdp --own "$root/examples/own/decoder.py" > init.txt
mkdir model
cat > model/config.json <<'CONFIG'
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
 "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
 "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000, "rms_norm_eps": 1e-06,
 "hidden_act": "silu", "attention_bias": false, "tie_word_embeddings": true, "torch_dtype": "bfloat16"}
CONFIG
python "$root/estimate.py" my_fsdp.py --gpus 8 --memory H100
