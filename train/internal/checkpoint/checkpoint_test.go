package checkpoint

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/internal/leak"
	"github.com/stowage-dev/stowage/train/internal/checkpoint/safetensors"
	"github.com/stowage-dev/stowage/train/internal/disk"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("STOWAGE_TEST_HOLD"); dir != "" {
		hold(dir)
	}
	if dir := os.Getenv("STOWAGE_TEST_SAVE"); dir != "" {
		saveForever(dir)
	}
	leak.Main(m)
}

// hold is another process that holds a lock until it is killed.
func hold(dir string) {
	s, err := Open(Options{Dir: dir})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("held")
	_ = s
	// An empty select would end the process: Go sees that nothing can go on.
	for {
		runtime.GC() // a store that nothing points to keeps its lock
		time.Sleep(time.Millisecond)
	}
}

// saveForever is another process that goes on from the latest checkpoint until it
// is killed.
func saveForever(dir string) {
	step := 0
	c, err := Latest(Options{Dir: dir})
	if err == nil {
		step = c.Step
	}
	s, err := Open(Options{Dir: dir})
	for err == nil {
		step++
		err = s.Save(metaOf(step), ranksOf(step))
		fmt.Println(step)
	}
	fmt.Println(err)
	os.Exit(1)
}

var errTrainer = errors.New("the device failed")

func failing(*safetensors.Writer) error { return errTrainer }

func metaOf(step int) Meta {
	return Meta{
		Step:   step,
		Layout: json.RawMessage(`{"pp": 2, "name": "<a&b>"}`),
		Config: json.RawMessage(fmt.Sprintf(`{"steps": %d}`, 10*step)),
		Data:   json.RawMessage(`{"seed": 18446744073709551615}`),
	}
}

// contents are the bytes of a tensor of a rank at a step.
func contents(step, rank int, t safetensors.Tensor) []byte {
	r := rand.New(rand.NewPCG(uint64(step)<<8|uint64(rank), uint64(len(t.Name))))
	b := make([]byte, t.Bytes())
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func tensorsOf(k kind, rank int) []safetensors.Tensor {
	if k == model {
		return []safetensors.Tensor{
			{Name: fmt.Sprintf("layers.%d.mlp.experts.linear_fc1.weight", rank), DType: safetensors.BF16, Shape: []int{8, 5}},
			{Name: "output", DType: safetensors.F32, Shape: []int{3, rank}},
		}
	}
	return []safetensors.Tensor{{Name: "exp_avg", DType: safetensors.F32, Shape: []int{20}}, {Name: "steps", DType: safetensors.I64}}
}

func shardOf(step, rank int, k kind) Shard {
	list := tensorsOf(k, rank)
	return Shard{list, func(w *safetensors.Writer) error {
		for _, t := range list {
			for piece := range slices.Chunk(contents(step, rank, t), 7) {
				if err := w.Write(t.Name, piece); err != nil {
					return err
				}
			}
		}
		return nil
	}}
}

func ranksOf(step int) []Rank {
	ranks := make([]Rank, 2)
	for i := range ranks {
		ranks[i] = Rank{i, shardOf(step, i, model), shardOf(step, i, optim)}
	}
	return ranks
}

func mustOpen(t *testing.T, o Options) *Store {
	t.Helper()
	s, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func mustSave(t *testing.T, s *Store, step int) {
	t.Helper()
	if err := s.Save(metaOf(step), ranksOf(step)); err != nil {
		t.Fatal(err)
	}
}

func mustClose(t *testing.T, s *Store) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// names lists the folder of checkpoints.
func names(t *testing.T, o Options) []string {
	t.Helper()
	list, err := o.fs().List(o.folder())
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(list)
	return list
}

// sentence wants one line that says more than a word.
func sentence(t *testing.T, s string) {
	t.Helper()
	if strings.Contains(s, "\n") || len(s) < 30 {
		t.Errorf("%q is not one sentence", s)
	}
}

// checkContents compares all that was saved.
func checkContents(t *testing.T, c *Checkpoint) {
	t.Helper()
	want := metaOf(c.Step)
	if c.Ranks != 2 || !same(c.Layout, want.Layout) || !same(c.Config, want.Config) || !same(c.Data, want.Data) {
		t.Errorf("the checkpoint says %d ranks, %s, %s, %s", c.Ranks, c.Layout, c.Config, c.Data)
	}
	for rank := range c.Ranks {
		for k, open := range []func(int) (*Tensors, error){c.Model, c.Optim} {
			f, err := open(rank)
			if err != nil {
				t.Error(err)
				continue
			}
			if f.Metadata()["format"] != "pt" {
				t.Errorf("metadata are %v", f.Metadata())
			}
			for _, want := range tensorsOf(kind(k), rank) {
				got, ok := f.Tensor(want.Name)
				if !ok || got.DType != want.DType {
					t.Errorf("got %v, want %v", got, want)
					continue
				}
				p := make([]byte, got.Bytes())
				if err := f.ReadAt(want.Name, p, 0); err != nil || !bytes.Equal(p, contents(c.Step, rank, want)) {
					t.Errorf("step %d, rank %d: %s differs, %v", c.Step, rank, want.Name, err)
				}
			}
			if err := f.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestSaveOnDisk(t *testing.T) {
	o := Options{Dir: filepath.Join(t.TempDir(), "runs", "first"), Warn: func(s string) { t.Error(s) }}
	s := mustOpen(t, o)
	for step := 100; step <= 400; step += 100 {
		mustSave(t, s, step)
		c, err := s.Latest()
		if err != nil || c.Step != step {
			t.Fatalf("after step %d: %v, %v", step, c, err)
		}
		checkContents(t, c)
	}
	if got, want := names(t, o), []string{"step-00000300", "step-00000400"}; !slices.Equal(got, want) {
		t.Errorf("the folder has %v, want %v", got, want)
	}
	if steps, err := Steps(o); err != nil || !slices.Equal(steps, []int{300, 400}) {
		t.Errorf("steps are %v, %v", steps, err)
	}
	mustClose(t, s)
	if text, err := os.ReadFile(filepath.Join(o.Dir, disk.LockName)); err != nil || len(text) > 0 {
		t.Errorf("after the end the lock names %q, %v", text, err)
	}
}

func TestKeep(t *testing.T) {
	for keep, want := range map[int][]int{0: {40, 50}, 1: {50}, 3: {30, 40, 50}, 9: {10, 20, 30, 40, 50}} {
		_, o, _ := stage(t, false)
		o.Keep = keep
		s := mustOpen(t, o)
		for step := 10; step <= 50; step += 10 {
			mustSave(t, s, step)
		}
		if steps, err := Steps(o); err != nil || !slices.Equal(steps, want) {
			t.Errorf("keep %d: %v, %v, want %v", keep, steps, err, want)
		}
	}
	if _, err := Open(Options{Dir: "/x", Keep: -1, FS: newMemory()}); err == nil {
		t.Error("kept -1")
	}
}

// A run may save before its first step and have one rank. Its checkpoint holds the run's
// description of itself unless the caller passes another one.
func TestSmallest(t *testing.T) {
	_, o, _ := stage(t, false)
	o.Run = json.RawMessage(`{"name":"of the store"}`)
	s := mustOpen(t, o)
	other := json.RawMessage(`{"name":"of the caller"}`)
	for step, run := range []json.RawMessage{o.Run, other} {
		meta := metaOf(step)
		if step > 0 {
			meta.Run = other
		}
		if err := s.Save(meta, ranksOf(step)[:1]); err != nil {
			t.Fatal(err)
		}
		c, err := s.Latest()
		if err != nil || c.Step != step || c.Ranks != 1 || !same(c.Run, run) {
			t.Fatalf("step %d: %+v, %v", step, c, err)
		}
		f, err := c.Model(0)
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
		for _, rank := range []int{-1, 1} {
			if text := panicOf(func() { _, _ = c.Model(rank) }); !strings.Contains(text, fmt.Sprintf("rank %d is not one of", rank)) {
				t.Errorf("rank %d: %q", rank, text)
			}
		}
	}
}

// panicOf returns what f panics with, as text.
func panicOf(f func()) (text string) {
	defer func() { text = fmt.Sprint(recover()) }()
	f()
	return ""
}

// The same step again is not written; another run's and later ones are refused.
func TestSaveTwice(t *testing.T) {
	m, o, _ := stage(t, true)
	s := mustOpen(t, o)
	if err := s.Save(metaOf(20), []Rank{{Model: Shard{Write: failing}}}); err != nil {
		t.Errorf("the step that is there: %v", err)
	}
	used := m.Used()
	other := metaOf(20)
	other.Data = json.RawMessage(`{"seed": 1}`)
	for step, meta := range map[int]Meta{20: other, 15: metaOf(15)} {
		err := s.Save(meta, ranksOf(step))
		if err == nil || !strings.Contains(err.Error(), "step 20 of another run") {
			t.Errorf("step %d: %v", step, err)
		}
	}
	if m.Used() != used {
		t.Errorf("%d bytes became %d", used, m.Used())
	}
}

func TestNone(t *testing.T) {
	_, o, _ := stage(t, false)
	for range 2 {
		_, err := Latest(o)
		if !errors.Is(err, ErrNone) {
			t.Errorf("got %v", err)
		}
		mustClose(t, mustOpen(t, o)) // now there is a folder, but it is empty
	}
	if _, err := Steps(Options{Dir: "/dev/null"}); err == nil {
		t.Error("a file has steps")
	}
}

// Names that only look like a checkpoint's are left alone.
func TestOtherNames(t *testing.T) {
	m, o, _ := stage(t, true)
	for _, name := range []string{"step-1", "step--0000001", "step-00000099x", "step-000000099", "notes"} {
		if err := m.Mkdir(filepath.Join(o.folder(), name)); err != nil {
			t.Fatal(err)
		}
	}
	before := len(names(t, o))
	if err := attempt(o, 100_000_000); err != nil {
		t.Fatal(err)
	}
	if steps, _ := Steps(o); !slices.Equal(steps, []int{20, 100_000_000}) || len(names(t, o)) != before {
		t.Errorf("steps are %v of %v", steps, names(t, o))
	}
}

func TestOpenRefused(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Open(Options{Dir: file})
	if err == nil || !strings.Contains(err.Error(), file+": not a directory; choose a folder") {
		t.Errorf("got %v", err)
	}
	// Something else in the place of the folder is found before the first save.
	for name, spoil := range map[string]func(string) error{
		"file": func(path string) error { return os.WriteFile(path, nil, 0o600) }, "link": func(path string) error { return os.Symlink("nowhere", path) },
	} {
		o := Options{Dir: filepath.Join(dir, "run with a "+name)}
		if err := errors.Join(os.Mkdir(o.Dir, 0o700), spoil(o.folder())); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(o); err == nil || !strings.HasPrefix(err.Error(), "cannot create the folder "+o.folder()) {
			t.Errorf("a %s: %v", name, err)
		}
		if _, err := Steps(o); name == "file" && (err == nil || !strings.HasSuffix(err.Error(), " is no folder; move it, or choose another folder")) {
			t.Errorf("a %s: %v", name, err)
		}
	}
	if os.Geteuid() != 0 { // root may write anywhere
		closed := filepath.Join(dir, "closed")
		if err := os.Mkdir(closed, 0o500); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(Options{Dir: closed}); err == nil || !strings.Contains(err.Error(), "permission denied; choose a folder") {
			t.Errorf("got %v", err)
		}
	}
}

// unsynced is a disk on which one folder cannot be synced.
type unsynced struct {
	disk.FS
	folder string
	no     syscall.Errno
}

func (d unsynced) SyncDir(name string) error {
	if name == d.folder {
		return &fs.PathError{Op: "open", Path: name, Err: d.no}
	}
	return d.FS.SyncDir(name)
}

// The folder above a run may be one that this user may not read: it cannot be synced, and the run
// goes on. Every other folder must be synced, and every other error is one.
func TestFolderAboveMayBeShut(t *testing.T) {
	for _, x := range []struct {
		folder string
		no     syscall.Errno
		opens  bool
	}{
		{"/disk", syscall.EACCES, true}, {"/disk", syscall.EPERM, true}, {"/disk", syscall.EIO, false},
		{"/disk/run", syscall.EACCES, false}, {"/disk/run", syscall.EIO, false},
	} {
		m := newMemory()
		if err := m.Mkdir("/disk/run"); err != nil {
			t.Fatal(err)
		}
		s, err := Open(Options{Dir: "/disk/run", FS: unsynced{m, x.folder, x.no}})
		if (err == nil) != x.opens || err != nil && !errors.Is(err, x.no) {
			t.Errorf("%s cannot be synced (%v): %v", x.folder, x.no, err)
		}
		if err == nil {
			mustSave(t, s, 10)
			mustClose(t, s)
		}
		if left := m.OpenFiles(); len(left) > 0 {
			t.Errorf("%s cannot be synced (%v): %q are open", x.folder, x.no, left)
		}
	}
}

// Processes are killed while they save on the disk: the latest checkpoint is the
// last one that they told of, or the one after it.
func TestKillProcess(t *testing.T) {
	o := Options{Dir: t.TempDir(), Warn: func(s string) { t.Error(s) }}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for round := range 12 {
		other := exec.Command(self)
		other.Env = append(os.Environ(), "STOWAGE_TEST_SAVE="+o.Dir)
		out, err := other.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := other.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for range 2 {
			lines.Scan()
		}
		time.Sleep(time.Duration(round) * time.Millisecond / 3)
		if err := other.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		told := lines.Text()
		for lines.Scan() {
			told = lines.Text()
		}
		_ = other.Wait()
		last, err := strconv.Atoi(told)
		if err != nil {
			t.Fatalf("the other process says %q", told)
		}
		c, err := Latest(o)
		if err != nil || c.Step != last && c.Step != last+1 {
			t.Fatalf("step %d was saved, then %v, %v", last, c, err)
		}
		checkContents(t, c)
	}
}

// Two runs do not write into one folder; the lock of a process that was killed is
// free.
func TestLock(t *testing.T) {
	o := Options{Dir: t.TempDir()}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	other := exec.Command(self)
	other.Env = append(os.Environ(), "STOWAGE_TEST_HOLD="+o.Dir)
	out, err := other.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 5)
	if n, err := out.Read(line); string(line[:n]) != "held\n" {
		t.Fatalf("the other process says %q, %v", line[:n], err)
	}
	_, err = Open(o)
	if want := fmt.Sprintf("%s is in use by process %d: ", o.Dir, other.Process.Pid); err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("got %v, want %s", err, want)
	}
	if err := other.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = other.Wait()
	if _, err := os.Stat(filepath.Join(o.Dir, disk.LockName)); err != nil {
		t.Error("the killed process left no lock: the test shows nothing")
	}
	s := mustOpen(t, o)
	if _, err := Open(o); err == nil || !strings.Contains(err.Error(), fmt.Sprint("process ", os.Getpid())) {
		t.Errorf("a second store in this process: %v", err)
	}
	mustClose(t, s)
	mustClose(t, mustOpen(t, o))
}
