// This file tests what every command says about a file that it cannot read: a device
// without an end, and a pipe that nothing writes to.

package main

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

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
			case <-time.After(time.Minute):
				t.Fatalf("%s hangs", words)
			}
		}
	}
}
