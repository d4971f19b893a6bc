// This file owns the tests of all launch files: what each file in testdata says, beside it
// in a file of the same name, and what is refused.

package launch

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/input/inputtest"
	"github.com/stowage-dev/stowage/plan/megatron"
)

// text writes what a file says, one fact a line.
func (f *File) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", f.System)
	if m := f.Model; m != nil {
		fmt.Fprintf(&b, "model %s: %d layers, hidden %d, vocabulary %d, %d parameters, %d active\n", m.Name, len(m.Layers), m.Hidden, m.Vocab, m.Parameters(), m.ActiveParameters())
		if m.MTP != nil {
			fmt.Fprintf(&b, "MTP of depth %d\n", m.MTP.Depth)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(f.Args)) {
		fmt.Fprintf(&b, "%s: %v\n", name, f.Args[name])
	}
	if f.GPUs > 0 {
		fmt.Fprintf(&b, "GPUs: %d\n", f.GPUs)
	}
	if f.Accumulation > 0 {
		fmt.Fprintf(&b, "microbatches of a step: %d\n", f.Accumulation)
	}
	for _, n := range f.Notes {
		fmt.Fprintf(&b, "note: %s\n", n)
	}
	return b.String()
}

// inputs returns the launch files of testdata.
func inputs(t testing.TB) (names []string) {
	t.Helper()
	all, err := filepath.Glob("testdata/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range all {
		if filepath.Ext(name) != ".golden" && filepath.Ext(name) != ".txt" && filepath.Base(name) != "fuzz" {
			names = append(names, name)
		}
	}
	return names
}

// SPEC S6.1
func TestLaunchFiles(t *testing.T) {
	for _, name := range inputs(t) {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		f, err := Parse(data, nil)
		if err != nil || f == nil {
			t.Errorf("%s: %v, %v", name, f, err)
			continue
		}
		golden.Check(t, filepath.Base(name)+".golden", f.text())
	}
}

// wrong is a file that is refused, with words of the error. A refused one is right and not
// modelled.
type wrong struct {
	file    string
	refused bool
	words   []string
}

func checkWrong(t *testing.T, list []wrong) {
	t.Helper()
	for _, c := range list {
		f, err := Parse([]byte(c.file), nil)
		if err == nil {
			t.Errorf("%s is accepted: %v", c.file, f)
			continue
		}
		for _, w := range c.words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v does not name %s", c.file, err, w)
			}
		}
		var refused *megatron.Refused
		if errors.As(err, &refused) != c.refused || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", c.file, err)
		}
	}
}

// Files of others are left to others.
func TestNotALaunchFile(t *testing.T) {
	for _, text := range []string{"", "{}", "[]", "7", `{"hidden_size": 8}`, `{"hidden_size": 8, "bf16": true, "fp16": false}`, "num-layers: 2\nhidden-size: 8", "torchrun pretrain_gpt.py --num-layers 2",
		"base_config=a.sh\nmodel_name=llama\ntorchrun pretrain_gpt.py --num-layers 2", "model_name=llama max_target_length=8\ntorchrun pretrain_gpt.py \\\n\t--num-layers 2",
	} {
		if f, err := Parse([]byte(text), nil); f != nil || err != nil {
			t.Errorf("%q is read as %v, %v", text, f, err)
		}
	}
}

// SPEC S6.1: reading any file does not panic, and an error is one sentence.
func FuzzParse(f *testing.F) {
	for _, name := range inputs(f) {
		data, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		defer inputtest.Bound(t, len(data))()
		file, err := Parse(data, nil)
		switch {
		case err != nil && (file != nil || strings.ContainsAny(err.Error(), "\n\r")):
			t.Fatalf("%v, %q", file, err)
		case err == nil && file != nil && file.Model != nil:
			if err := file.Model.Check(); err != nil {
				t.Fatal(err)
			}
		}
	})
}
