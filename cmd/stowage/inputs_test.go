// This file tests what every command says about a file that it cannot read: a device
// without an end, and a pipe that nothing writes to.

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Names in files do not command the terminal, wherever they are printed. JSON keeps them.
func TestNamesInFiles(t *testing.T) {
	const name = "\x1b]0;owned\a\x1b[2J\u009b31m\u202e"
	dir := t.TempDir()
	config := filepath.Join(dir, "config.json")
	keys, err := json.Marshal(map[string]any{
		"_name_or_path": name, "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
		"vocab_size": 256, "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "hidden_act": "silu", "attention_dropout": 0.5,
	})
	if err == nil {
		err = os.WriteFile(config, keys, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	said := 0
	for _, args := range []string{
		"plan --config FILE", "plan --config FILE --json", "plan --config FILE --flags stowage", "plan --config FILE --explain", "bench pools --model FILE --ep 1 --dp 2",
		"train --model FILE --dry-run --policy stash --pp 1 --dp 1 --seq 64", "train --model FILE --steps 1 --policy none --pp 1 --dp 1 --seq 64 --plain",
	} {
		var out, errs strings.Builder
		execute(strings.Fields(strings.ReplaceAll(args, "FILE", config)), &out, &errs)
		text := out.String() + errs.String()
		if strings.ContainsAny(text, "\x1b\a\u009b\u202e") {
			t.Errorf("%s printed %q", args, text)
		}
		if strings.Contains(text, `\u001b]0;owned`) {
			said++
		}
		if strings.HasSuffix(args, "--json") {
			var r any
			if err := json.Unmarshal([]byte(out.String()), &r); err != nil || !strings.Contains(fmt.Sprint(r), name) {
				t.Errorf("%s: %v, %.300s", args, err, out.String())
			}
		}
	}
	if said < 3 {
		t.Errorf("only %d commands printed the name", said)
	}
}

// Each command refuses both at once, in one sentence.
func TestNoFiles(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe.yaml")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Skip(err)
	}
	for _, args := range []string{
		"plan --model FILE", "plan --config FILE", "plan --megatron FILE", "plan --model llama-3-8b --gpu FILE",
		"plan --model mixtral-8x7b --gpus 8 --ep 8 --routing counts:FILE", "plan --compare FILE FILE", "plan validate --cases FILE",
		"train --dry-run --model FILE", "train --dry-run --config FILE", "train --dry-run --data FILE",
		"report FILE", "bench stash --trace FILE", "bench record --to HISTORY FILE", "bench pools --model FILE",
	} {
		for _, file := range []string{"/dev/zero", pipe} {
			words := strings.NewReplacer("FILE", file, "HISTORY", filepath.Join(t.TempDir(), "h.jsonl")).Replace(args)
			var out, errs strings.Builder
			done := make(chan int, 1)
			go func() { done <- execute(strings.Fields(words), &out, &errs) }()
			select {
			case code := <-done:
				text := strings.TrimSpace(errs.String())
				if code == 0 || strings.Contains(text, "\n") || !strings.Contains(text, file) {
					t.Errorf("%s: code %d, %q", words, code, text)
				}
				t.Logf("%s\n\t%s", words, text)
			case <-time.After(5 * time.Minute):
				t.Fatalf("%s hangs", words)
			}
		}
	}
}
