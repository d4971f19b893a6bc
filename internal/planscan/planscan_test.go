package planscan

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

const job = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 --micro-batch-size 1 --bf16\n"

func folder(t *testing.T, files map[string]string) string {
	dir := t.TempDir()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestFind(t *testing.T) {
	dir := folder(t, map[string]string{"b/x.sh": job, "a.yaml": job, "notes.txt": job, "c/model_config.yaml": job})
	if err := os.Symlink("b/x.sh", filepath.Join(dir, "link.sh")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("nowhere", filepath.Join(dir, "broken.sh")); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "pipe.sh"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("b", filepath.Join(dir, "linked")); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		folders, names []string
		want           string
	}{
		{[]string{"linked"}, Names, "linked/x.sh"},
		{[]string{"."}, Names, "a.yaml b/x.sh c/model_config.yaml link.sh"},
		{[]string{"b", "b", "."}, []string{"*.sh"}, "b/x.sh link.sh"},
		{[]string{"notes.txt"}, Names, "notes.txt"},
		{[]string{"pipe.sh"}, Names, "pipe.sh"}, // what is named is meant
	} {
		var roots []string
		for _, f := range c.folders {
			roots = append(roots, filepath.Join(dir, f))
		}
		files, err := Find(roots, c.names)
		if err != nil {
			t.Fatal(err)
		}
		for i, f := range files {
			files[i], _ = filepath.Rel(dir, f)
		}
		if got := strings.Join(files, " "); got != c.want {
			t.Errorf("%v: %s, want %s", c.folders, got, c.want)
		}
	}
	for _, name := range []string{"nowhere", "broken.sh"} {
		if _, err := Find([]string{filepath.Join(dir, name)}, Names); err == nil || !strings.Contains(err.Error(), name+" cannot be read: no such file") {
			t.Errorf("%s, which is not there: %v", name, err)
		}
	}
	if _, err := Find([]string{dir}, []string{"["}); err == nil || !strings.Contains(err.Error(), "is not a pattern") {
		t.Errorf("a broken pattern: %v", err)
	}
}

func TestScan(t *testing.T) {
	dir := folder(t, map[string]string{
		"a.sh": job, "b.sh": job + "--optimizer lion", "c.sh": "echo hello", "d.sh": job + "--tensor-model-parallel-size 3", "e.sh": "cd x", "f.sh": "--x 'open",
	})
	files, err := Find([]string{dir}, Names)
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	r := Scan(files, "h100", func(done, all int) { seen += all - done })
	if r.Files != 6 || r.Planned != 1 || len(r.Rows) != 6 || seen != 15 {
		t.Errorf("%+v", r)
	}
	want := []Count{{"no model in the file", 2}, {Unread, 1}, {"option that is not modelled", 1}, {Contradiction, 1}}
	if !slices.Equal(r.Refused, want) {
		t.Errorf("refused %v, want %v", r.Refused, want)
	}
	var text strings.Builder
	r.WriteText(&text)
	for _, line := range []string{"    6  files\n    1  planned as they are\n    2  refused: no model in the file\n", "b.sh: --optimizer lion"} {
		if !strings.Contains(strings.ReplaceAll(text.String(), "\n    --optimizer", " --optimizer"), line) {
			t.Errorf("%q is missing in\n%s", line, text.String())
		}
	}
}
