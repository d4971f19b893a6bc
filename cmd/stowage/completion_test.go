// This file tests completion: the words, and the script in a shell.

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train"
)

// completions returns the words that the program offers for a command line, whose last
// word is being typed.
func completions(t *testing.T, line ...string) (offered []string) {
	t.Helper()
	stdout, _, code := command(append([]string{"__complete"}, line...)...)
	if code != exitOK {
		t.Fatalf("%q: code %d", line, code)
	}
	for text := range strings.Lines(stdout) {
		if word, _, _ := strings.Cut(strings.TrimSpace(text), "\t"); !strings.HasPrefix(word, ":") {
			offered = append(offered, word)
		}
	}
	return offered
}

// A request to complete that names no word is one to complete the first.
func TestCompletionOfNothing(t *testing.T) {
	for _, request := range []string{"__complete", "__completeNoDesc"} {
		want, _, _ := command(request, "")
		if got, stderr, code := command(request); code != exitOK || got != want || got == "" {
			t.Errorf("%s: code %d, %q, %q", request, code, got, stderr)
		}
	}
}

// Names of commands, models, policies, modules, hardware, pools and settings complete.
func TestCompletion(t *testing.T) {
	for _, x := range []struct{ line, want string }{
		{"", "bench completion doctor help plan report train version"}, {"t", "train"}, {"bench ", "copy offload pools record stash"}, {"help bench p", "copy offload pools record stash"}, {"completion ", "bash zsh fish"},
		{"train --model tiny-d", "tiny-deepseek tiny-dense"}, {"bench pools --model=mix", "mixtral-8x22b mixtral-8x7b"}, {"plan --model kim", "kimi-k2"},
		{"train --policy o", "offload offload+recompute"}, {"train --policy=bu", "budget"},
		{"train --offload-modules moe", "moe_act"}, {"train --offload-modules core_attn fused", "fused_group_mlp"}, {"train --recompute-modules core_attn,la", "core_attn,layernorm"},
		{"train --policy stash ", ""}, {"train --policy stash --graph mo", "moe_router moe"}, {"train --bf16 --pool a", "arena"}, {"train --pp ", ""},
		{"train --grad-comm-dtype ", "bf16 fp32"}, {"train --resu", "--resume"}, {"train --micro", "--micro --microbatches"},
		{"plan --gpu h", "h100 h200"}, {"plan --offl", "--offload --offload-bytes"}, {"plan --offload moe_", "moe_act"}, {"plan --search ", "policy layout none"},
		{"plan --recompute core_attn fu", "full"}, {"plan --fsdp g", "grads"}, {"plan --rank a", "all"}, {"plan --model llama-3-8b --flags m", "megatron maxtext"},
		{"plan r", "ring"}, {"plan explain --gpu gb", "gb200 gb300"},
		{"bench offload --graph ", "none scopes full"}, {"bench offload --cuda-graph-scope attn,ml", "attn,mlp"}, {"bench stash --synth ", "zipf drift burst"}, {"bench stash --device cu", "cuda"},
	} {
		if got := strings.Join(completions(t, strings.Split(x.line, " ")...), " "); got != x.want {
			t.Errorf("%q completes to %q, want %q", x.line, got, x.want)
		}
	}
	if got := completions(t, "train", "--model", ""); !slices.Equal(got, model.Presets()) {
		t.Errorf("the models are %q", got)
	}
	if got := completions(t, "train", "--policy", ""); !slices.Equal(got, append(slices.Clone(train.Policies), everyPolicy)) {
		t.Errorf("the policies are %q", got)
	}
	if got := completions(t, "plan", "explain", ""); !slices.Contains(got, "core_attn") {
		t.Errorf("the groups are %q", got)
	}
}

// Every word that completion offers is one that the command knows.
func TestCompletedWords(t *testing.T) {
	for key, words := range flagWords {
		fields := strings.Fields(key)
		flag, path := fields[len(fields)-1], fields[:len(fields)-1]
		cmd, _, err := newRoot().Find(path)
		if err != nil {
			t.Fatal(err)
		}
		if len(path) == 0 {
			continue // several commands may have it
		}
		if len(words()) == 0 || cmd.Flags().Lookup(flag) == nil && len(completeSetting(cmd, "--"+flag)) == 0 {
			t.Errorf("%s: no such flag, or no words", key)
		}
	}
}

// The scripts load, and the one for bash completes without the package bash-completion.
func TestCompletionScripts(t *testing.T) {
	for _, shell := range shells {
		stdout, stderr, code := command("completion", shell)
		if code != exitOK || stderr != "" || !strings.Contains(stdout, "__complete") {
			t.Errorf("%s: code %d, errors %q", shell, code, stderr)
		}
		program, err := exec.LookPath(shell)
		if err != nil {
			t.Logf("there is no %s here", shell)
			continue
		}
		file := filepath.Join(t.TempDir(), shell)
		if err := os.WriteFile(file, []byte(stdout), 0o644); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command(program, "-n", file).CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("%s: %v, %s", shell, err, out)
		}
	}
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("there is no bash")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "stowage"), []byte("#!/bin/sh\nexec '"+self+"' \"$@\"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	const script = `source <(stowage completion bash)
complete -p stowage >/dev/null || exit 1
for COMP_LINE in "stowage pl" "stowage train --policy gr" "stowage plan --model deepseek-v2-" "stowage train --dispatch=ri"; do
	COMP_POINT=${#COMP_LINE} COMP_TYPE=9 COMP_KEY=9 COMPREPLY=()
	__start_stowage 2>/dev/null
	printf '%s|' "${COMPREPLY[@]%% *}"
done`
	cmd := exec.Command(bash, "--norc", "-c", script)
	cmd.Env = append(os.Environ(), asProgram+"=1", "PATH="+dir+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	if want := "plan|graphs|deepseek-v2-lite|ring|"; err != nil || string(out) != want {
		t.Errorf("bash completes to %q, %v; want %q", out, err, want)
	}
}
