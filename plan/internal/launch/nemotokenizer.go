// This file owns the tokenizer of NeMo and Megatron-Bridge, which decides the size of the
// vocabulary where the model does not state it.

package launch

import (
	"cmp"
	"strings"
)

// nemoLibraries are the tokenizers of Megatron-LM by the names of NeMo's libraries.
var nemoLibraries = map[string]string{
	"huggingface": "HuggingFaceTokenizer", "sentencepiece": "SentencePieceTokenizer", "tiktoken": "TikTokenizer", "null": "NullTokenizer",
}

// nemoTokenizer reads the tokenizer of a file that describes its model. Another one has the
// vocabulary of the model beside it.
func (r *reader) nemoTokenizer(parent *table) {
	text, is := parent.keys["tokenizer"].(string)
	if is && strings.Contains(text, "${") {
		parent.read["tokenizer"] = true
		r.note("%stokenizer is %.60s, which another file sets; it is left out", parent.path, text)
		return
	}
	t := parent.sub("tokenizer")
	if !r.file.Described() || r.file.Args["vocab-size"] != nil {
		return
	}
	if t.has("vocab_size") {
		r.nemoValue(t.path+"vocab_size", "vocab-size", t.keys["vocab_size"])
	}
	library, kind := t.word("library", ""), t.word("type", "")
	file := cmp.Or(t.word("tokenizer_model", ""), t.word("model", ""), t.word("model_name", ""), t.word("pretrained_model_name", ""))
	switch {
	case t.has("tokenizer_type"):
		kind = t.word("tokenizer_type", "")
	case library == "megatron":
	case nemoLibraries[library] != "":
		kind, file = nemoLibraries[library], cmp.Or(file, kind)
	case library == "" && !strings.HasSuffix(kind, "Tokenizer"): // the name of a model
		kind, file = "", cmp.Or(file, kind)
	default:
		kind = cmp.Or(kind, library)
	}
	for flag, word := range map[string]string{"tokenizer-type": kind, "tokenizer-model": file} {
		if word != "" {
			r.set(flag, word)
		}
	}
}
