// This file owns the size of the vocabulary where the arguments leave it to a tokenizer.

package megatron

import (
	"fmt"
	"path"
	"regexp"
	"strings"
)

// defaultTokenizer is what Megatron-LM's training programs take without --tokenizer-type
// (pretrain_gpt.py and pretrain_hybrid.py, args_defaults).
const defaultTokenizer = "GPT2BPETokenizer"

// tokenizers have vocabularies that do not depend on a file: GPT-2's words, Llama 2's, and
// the default of TikTokenizer's files, 2^17 (tiktoken_tokenizer.py,
// DEFAULT_TIKTOKEN_MAX_VOCAB).
var tokenizers = map[string]int{defaultTokenizer: 50257, "Llama2Tokenizer": 32000, "TikTokenizer": 1 << 17}

// families are the lengths of published tokenizers, by what the name of a model or of its
// folder contains. The first that matches counts. Megatron-LM takes the length of the
// tokenizer, which can be below the size that the model's config.json states.
var families = []struct {
	name  string
	words int
}{
	{"distill-qwen", 151665}, {"distill-llama", 128256},
	{"llama-4", 202048}, {"llama4", 202048},
	{"llama-3", 128256}, {"llama3", 128256}, {"llama_3", 128256},
	{"llama-2", 32000}, {"llama2", 32000}, {"vicuna", 32000},
	{"qwen3", 151669}, {"qwen2", 151665}, {"qwen_2", 151665},
	{"deepseek-v2", 100002}, {"deepseek-v3", 128815}, {"deepseek-r1", 128815},
	{"gpt-oss", 200019}, {"kimi-k2", 163840},
	{"mistral-nemo", 131072}, {"mixtral-8x22b", 32768}, {"mixtral", 32000}, {"mistral-7b", 32000},
	{"nemotron-mini", 256000}, {"minitron", 256000}, {"nemotron-4", 256000}, {"nemotron4", 256000},
	{"nemotron", 131072},
	{"gemma-3", 262145}, {"gemma", 256000}, {"gpt2", 50257},
}

// sentencePieces is the vocabulary of the SentencePiece model that Megatron-LM's own
// GPTSentencePieceTokenizer jobs use, if the name of the file does not say.
const sentencePieces = 256000

// thousand finds the size in the name of a tokenizer's file, such as nemotron_2_256k.model.
// Files that count by binary thousands have a power of two.
var thousand = regexp.MustCompile(`(?i)(?:^|[^0-9a-z])(32|64|128|256)k(?:[^0-9a-z]|$)`)

// readVocab returns the size of the vocabulary before it is padded.
func readVocab(r *reader, o Options) int {
	given, padded := r.positive("vocab-size", 0), r.positive("padded-vocab-size", 0)
	extra := r.count("vocab-extra-ids", 0)
	kind, file := r.plainWord("tokenizer-type"), r.plainWord("tokenizer-model")
	switch {
	case padded > 0:
		return padded
	case given > 0:
		return given + extra
	case o.Vocab > 0:
		return o.Vocab + extra
	}
	words, why := tokenizerWords(kind, file)
	if open := variablesIn(kind, file); words == 0 && len(open) > 0 && r.err == nil {
		r.err = &Refused{Kind: environment, NoJob: true, Variables: open, Text: fmt.Sprintf("the size of the vocabulary (--vocab-size) is not in the arguments, and %s", why)}
		return 0
	}
	if words == 0 {
		r.fail("the size of the vocabulary is not in the arguments, and %s; give it as --vocab-size", why)
		return 0
	}
	r.warn("vocab-size", fmt.Sprintf("is not given; %s has %d words", why, words))
	return words + extra
}

// computed is arithmetic, in which names stand without a dollar sign.
var computed, nameInside = regexp.MustCompile(`\$\(\(.*?\)\)`), regexp.MustCompile(`\b[A-Za-z_][A-Za-z0-9_]*`)

// variablesIn returns the names of the variables in words.
func variablesIn(words ...string) (names []string) {
	text := strings.Join(words, " ")
	for _, m := range variableName.FindAllStringSubmatch(text, -1) {
		name, dot := strings.CutSuffix(m[1], ".")
		if !dot || !strings.HasPrefix(m[0], "${") { // ${data.file} is a key of YAML
			names = append(names, name)
		}
	}
	for _, m := range computed.FindAllString(text, -1) {
		names = append(names, nameInside.FindAllString(m, -1)...)
	}
	return names
}

// tokenizerWords returns the size of a tokenizer's vocabulary and what it is the size of,
// or zero and why it is not known.
func tokenizerWords(kind, file string) (int, string) {
	base := path.Base(strings.TrimRight(file, "/"))
	switch {
	case kind == "" && file == "":
		return tokenizers[defaultTokenizer], defaultTokenizer + ", which Megatron-LM takes without --tokenizer-type,"
	case kind == "" || isVariable(kind):
		if n := namedWords(file, base); n > 0 {
			return n, base
		}
		return 0, fmt.Sprintf("the tokenizer (%s) is not known", strings.Join(strings.Fields(kind+" "+file), " "))
	case kind == "GPT2BPETokenizer" || kind == "TikTokenizer": // their sizes do not depend on a file
		return tokenizers[kind], kind
	}
	if n := namedWords(file, base); n > 0 {
		return n, kind + " of " + base
	}
	switch {
	case tokenizers[kind] > 0:
		return tokenizers[kind], kind
	case kind == "GPTSentencePieceTokenizer":
		return sentencePieces, kind + ", as Megatron-LM's own jobs use it,"
	case file == "":
		return 0, kind + " names no model"
	}
	return 0, fmt.Sprintf("the tokenizer %s is not known", base)
}

// namedWords returns what the name of a tokenizer says about its size, or zero.
func namedWords(name, base string) int {
	if m := thousand.FindStringSubmatch(base); m != nil && path.Ext(base) != "" {
		size := map[string]int{"32": 32000, "64": 64000, "128": 1 << 17, "256": 256000}
		return size[m[1]]
	}
	name = strings.ToLower(name)
	for _, f := range families {
		if strings.Contains(name, f.name) {
			return f.words
		}
	}
	return 0
}
