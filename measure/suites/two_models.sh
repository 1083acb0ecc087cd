# What docs/your_own_model.md predicts for Qwen3-0.6B with Qwen3-8B as a teacher: configurations as on the Hub, no weights.
set -e
root=$PWD
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
cd "$folder"
cp "$root/examples/own/decoder.py" functions.py
cat >> functions.py <<'CODE'


TEACHER = "teacher"  # a folder of the Hub with the same tokenizer


def make_teacher():
    return AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32)
CODE
python "$root/estimate.py" init my_distillation.py --from distillation --own functions.py > init.txt
mkdir model teacher
common='"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8,
 "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000, "rms_norm_eps": 1e-06, "hidden_act": "silu"'
echo "{$common, \"hidden_size\": 1024, \"intermediate_size\": 3072, \"num_hidden_layers\": 28,
 \"num_attention_heads\": 16, \"tie_word_embeddings\": true}" > model/config.json
echo "{$common, \"hidden_size\": 4096, \"intermediate_size\": 12288, \"num_hidden_layers\": 36,
 \"num_attention_heads\": 32, \"tie_word_embeddings\": false}" > teacher/config.json
python "$root/estimate.py" my_distillation.py --gpus 8 --memory H100 2>&1 | sed -n '/^predicted/,/^CPU/p'
