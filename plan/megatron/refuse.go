// This file owns jobs that are not trained decoders: what they are recognised by, and the
// words in which they are refused.

package megatron

import (
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
)

// The kinds of jobs that are not predicted, for counts of them.
const (
	noModelKind   = "no model in the file"
	recipe        = "recipe of NeMo"
	inference     = "inference"
	tool          = "export, data or evaluation"
	reinforcement = "reinforcement learning"
	encoder       = "encoder"
	encoderBeside = "encoder and decoder"
	tower         = "vision or audio tower"
	distillation  = "distillation"
	frozen        = "frozen parameters"
	option        = "option that is not modelled"
	environment   = "needs its environment"
)

// Refused is the error about a job that cannot be predicted although its arguments may
// be right. A forecast of it would look like an answer and be none.
type Refused struct {
	Kind string // why, in a few words that are the same for all such jobs
	Text string // a sentence
	// NoJob is true if the input holds no whole job: no model, or variables of its
	// environment in place of values.
	NoJob bool
	// Variables are the names of variables that are not set and whose values matter.
	Variables []string
}

// Error returns the sentence.
func (e *Refused) Error() string { return e.Text }

func refused(kind string, format string, a ...any) error {
	return &Refused{Kind: kind, Text: fmt.Sprintf(format, a...), NoJob: kind == noModelKind || kind == recipe}
}

// These keys stand among the arguments of a file for what it says beside them: the program
// that a script runs or the mode of a functional test, the files that it sources, the
// variables that may hold more arguments, the flags that a condition decides which is not
// known, whether it launches other jobs, notes about variables that it does not use,
// expansions that are not followed, other notes, the given variables that it uses, and those
// that it cannot compute with. No flag has such a name.
const (
	programKey, sourcedKey, openKey, guessedKey = "$program", "$sourced", "$open", "$guessed"
	othersKey, unusedKey, unreadKey, notesKey   = "$others", "$unused", "$unread", "$notes"
	givenKey, wrongKey                          = "$given", "$wrong"
)

var besides = []string{programKey, sourcedKey, openKey, guessedKey, othersKey, unusedKey, unreadKey, notesKey, givenKey, wrongKey}

// sizeFlags say that there is a model.
var sizeFlags = []string{"num-layers", "encoder-num-layers", "hidden-size", "num-attention-heads", "hybrid-layer-pattern", "hybrid-override-pattern"}

// signs are flags that only one kind of job has.
var signs = []struct {
	kind  string
	flags []string
	text  string
}{
	{reinforcement, []string{"perform-rl-step", "grpo-group-size", "grpo-iterations", "grpo-kl-beta", "langrl-env-config"},
		"reinforcement learning, which holds an inference engine and often a second model beside the one that trains"},
	{tower, []string{"language-model-type", "vision-model-type", "img-h", "img-w", "patch-dim", "audio-encoder-model", "allow-missing-vision-projection-checkpoint"},
		"a model with a vision or audio tower"},
	{distillation, []string{"export-kd-teacher-load", "export-kd-cfg", "teacher-model-config", "logits-load-dir"},
		"distillation, which holds a teacher or its logits beside the model"},
	{inference, []string{"num-tokens-to-generate", "prompts", "prompt-file", "inference-ckpt-non-strict", "max-tokens-to-generate"},
		"inference"},
	{encoderBeside, []string{"decoder-num-layers", "decoder-seq-length"},
		"an encoder beside a decoder (T5)"},
	{encoder, []string{"bert-no-binary-head", "bert-load", "ict-head-size", "biencoder-projection-dim", "retro-workdir", "retro-add-retriever", "retro-project-dir"},
		"an encoder or a retriever (BERT, RETRO)"},
	{frozen, []string{"freeze-all-layers", "freeze-lm", "freeze-vit"},
		"a model of which parts are frozen"},
}

// programs are the words in the name of a program that say what it does. The names of the
// two folders that it lies in count too, if they are such a word. The first that matches
// counts.
var programs = []struct {
	word string
	kind string
}{
	{"inference", inference}, {"generat", inference}, {"text_gen", inference}, {"server", inference},
	{"train_rl", reinforcement}, {"grpo", reinforcement},
	{"bert", encoder}, {"biencoder", encoder}, {"_ict", encoder}, {"retro", encoder}, {"_t5", encoderBeside},
	{"vlm", tower}, {"vision", tower}, {"multimodal", tower}, {"mimo", tower}, {"llava", tower},
	{"pretrain", ""}, {"finetune", ""}, {"train", ""},
	{"quantize", tool}, {"prune", tool}, {"export", tool}, {"convert", tool}, {"preprocess", tool}, {"mmlu", tool}, {"validate", tool},
	{"checkpoint", tool}, {"extract", tool}, {"eval", tool}, {"tasks", tool}, {"combine", tool},
}

var programTexts = map[string]string{
	inference: "inference", reinforcement: "reinforcement learning", encoder: "an encoder", encoderBeside: "an encoder beside a decoder",
	tower: "a model with a vision or audio tower", tool: "export, data or evaluation",
}

// decoders are the programs of Megatron-LM that train decoders, wherever they lie.
var decoders = []string{"pretrain_gpt.", "pretrain_hybrid.", "pretrain_mamba."}

// programKind returns what the name of a program says, and whether it says anything.
func programKind(name string) (string, bool) {
	folders := strings.Split(strings.ToLower(name), "/")
	file := folders[len(folders)-1]
	folders = folders[max(len(folders)-3, 0) : len(folders)-1]
	if slices.ContainsFunc(decoders, func(d string) bool { return strings.HasPrefix(file, d) }) {
		folders = nil
	}
	for _, p := range programs {
		if strings.Contains(file, p.word) || slices.Contains(folders, p.word) {
			return p.kind, true
		}
	}
	return "", false
}

// divides has the refused options that do nothing if they are 1.
var divides = map[string]bool{"mlp-chunks-for-training": true, "tensor-parallel-num-weight-shards": true, "expert-tensor-parallel-num-weight-shards": true}

const onlyDecoders = "only training steps of decoder models are predicted"

// refuse returns an error if the arguments are not those of a decoder that trains.
func refuse(r *reader, o Options) error {
	program := strings.Join(r.args[programKey].words, " ")
	for _, key := range besides {
		r.known[key] = true
	}
	for _, name := range r.args[guessedKey].words {
		r.warn(name, "a condition of the script that is not known decides it, such as whether a file is there; the last branch that may run is planned")
	}
	if r.isOn(othersKey) {
		r.warn("", fmt.Sprintf("the script launches %s more than once, with different arguments; only the last launch is planned", path.Base(program)))
	}
	for _, word := range r.args[openKey].words {
		r.more(word)
	}
	for _, file := range r.args[sourcedKey].words {
		r.warn("", fmt.Sprintf("the script reads %s, which was not found: what it sets takes no part", file))
	}
	for _, text := range slices.Concat(r.args[unusedKey].words, r.args[notesKey].words) {
		r.warn("", text)
	}
	if o.Model == nil {
		if err := r.noModel(program); err != nil {
			return err
		}
	}
	if kind, _ := programKind(program); kind != "" {
		return refused(kind, "the job is %s (%s), which is not modelled; %s", programTexts[kind], path.Base(program), onlyDecoders)
	}
	for _, s := range signs {
		for _, flag := range s.flags {
			if r.known[flag] = true; r.isOn(flag) {
				return refused(s.kind, "the job is %s (--%s), which is not modelled; %s", s.text, flag, onlyDecoders)
			}
		}
	}
	if provider := r.plainWord("model-provider"); provider != "" && !slices.Contains([]string{"gpt", "hybrid", "mamba"}, provider) {
		return refused(tower, "the job is a model with a vision or audio tower (--model-provider %s), which is not modelled; %s", provider, onlyDecoders)
	}
	for _, name := range slices.Sorted(maps.Keys(r.args)) {
		if strings.HasPrefix(name, "export-kd-teacher") && r.isOn(name) {
			return refused(distillation, "the job is distillation (--%s), which holds a teacher beside the model and is not modelled", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(refusedOptions)) {
		if r.known[name] = true; r.isOn(name) && !(divides[name] && r.plainWord(name) == "1") {
			return refused(option, "--%s %s, which is not modelled; give --%[1]s false to plan the job without it", name, refusedOptions[name])
		}
	}
	return r.wordPieces()
}

// noModel returns an error if no argument gives the size of a model.
func (r *reader) noModel(program string) error {
	for _, name := range sizeFlags {
		if r.isOn(name) {
			return nil
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.args)) {
		if strings.Contains(name, ".") {
			return refused(recipe, "there is no model in this file: its keys are those of a NeMo recipe (%s), which names its model elsewhere; expected Megatron-LM's arguments, such as num-layers", name)
		}
	}
	more := "expected --num-layers and --hidden-size, or --hybrid-layer-pattern"
	sourced, open := r.args[sourcedKey].words, r.args[openKey].words
	switch {
	case r.isOn("use-checkpoint-args"):
		more = "--use-checkpoint-args takes it from a checkpoint; " + more
	case len(open) > 0 && strings.Contains(open[0], "$("):
		more = open[0] + ", which is not run, may print it; " + more
	case len(open) > 0:
		more = open[0] + ", which it does not set, may hold it; " + more
	case len(sourced) > 0:
		more = "it may be in " + sourced[0] + ", which it sources; " + more
	case program != "":
		more = "it runs " + program + "; " + more
	}
	return refused(noModelKind, "there is no model in this file: %s", more)
}

// wordPieces refuses the vocabularies of encoders. BERT's is a list of words in a .txt
// file; decoders have byte pairs in a .json file, or a model of SentencePiece.
func (r *reader) wordPieces() error {
	kind, file := r.plainWord("tokenizer-type"), r.plainWord("vocab-file")
	switch {
	case strings.HasPrefix(kind, "BertWordPiece"):
		return refused(encoder, "the job is an encoder (--tokenizer-type %s), which is not modelled; %s", kind, onlyDecoders)
	case kind == "MultimodalTokenizer" || kind == "NullMultimodalTokenizer":
		return refused(tower, "the job is a model with a vision or audio tower (--tokenizer-type %s), which is not modelled; %s", kind, onlyDecoders)
	case kind == "" && strings.HasSuffix(file, ".txt"):
		return refused(encoder, "the job is an encoder (--vocab-file %s is a vocabulary of BERT), which is not modelled; %s", path.Base(file), onlyDecoders)
	}
	return nil
}

// variableName finds a variable, with a dot that may stand behind its name.
var variableName = regexp.MustCompile(`\$\{?(?:oc\.env:\s*)?([A-Za-z_][A-Za-z0-9_]*\.?|[0-9])`)

// unset returns the error about a value that a file takes from its environment.
func (r *reader) unset(flag, word string) error {
	e := &Refused{Kind: environment, NoJob: true, Text: fmt.Sprintf("--%s %s: the variable is not set in the text", flag, word)}
	ignored := ignoredFlags()
	for _, name := range slices.Sorted(maps.Keys(r.args)) {
		if ignored[name] || slices.Contains(besides, name) {
			continue
		}
		for _, v := range variablesIn(r.args[name].words...) {
			if !slices.Contains(e.Variables, v) && !r.isGiven(v) {
				e.Variables = append(e.Variables, v)
			}
		}
	}
	if unread := r.args[unreadKey].words; slices.ContainsFunc(unread, func(u string) bool { return strings.Contains(word, u) }) {
		e.Text = fmt.Sprintf("--%s %s: what bash makes of this is not followed; write the value in its place, or give --%[1]s beside the file", flag, word)
		e.Variables = nil
	} else if strings.Contains(word, "$((") {
		e.Text = fmt.Sprintf("--%s %s: the value cannot be computed: a variable in it is not set in the text, or it divides by zero or is too large", flag, word)
	} else if strings.Contains(word, "$(") {
		e.Text = fmt.Sprintf("--%s %s: the value is the output of a command, which is not run; write the value in its place, or give --%[1]s beside the file", flag, word)
	}
	return e
}

// isOn reports whether a flag is given and not switched off. It does not mark the flag as
// understood.
func (r *reader) isOn(name string) bool {
	v, ok := r.args[name]
	return ok && !v.off && !(len(v.words) == 1 && strings.EqualFold(v.words[0], "false"))
}

// plainWord returns a flag's word as it is written, also if it names a variable, and marks
// the flag as understood.
func (r *reader) plainWord(name string) string {
	r.known[name] = true
	v := r.args[name]
	if v.open != "" {
		return v.open
	}
	if v.off || len(v.words) == 0 || strings.EqualFold(v.words[0], "none") {
		return ""
	}
	return strings.Trim(v.words[0], `"'`)
}
