// This file owns the tests of what may happen to a checkpoint after it was
// written: missing files, cut files, wrong bits, other versions.

package checkpoint

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stowage-dev/stowage/train/internal/disk"
	"github.com/stowage-dev/stowage/train/internal/disk/disktest"
)

// files of the newest checkpoint of a stage.
var newest = []string{
	manifestName,
	"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
	"optim-00001-of-00002.safetensors", "optim-00002-of-00002.safetensors",
}

// spoil changes one file of a checkpoint as the disk would.
func spoil(t *testing.T, m *memory, o Options, step int, name string, f func(b []byte) []byte) {
	t.Helper()
	if err := m.Spoil(filepath.Join(o.folder(), nameOf(step), name), f); err != nil {
		t.Fatal(err)
	}
}

// fallsBack wants step 10, one warning that names the damaged checkpoint and the
// file, and that the run can write its step 20 again.
func fallsBack(t *testing.T, o Options, warnings *[]string, file string) {
	t.Helper()
	c, err := Latest(o)
	if err != nil || c.Step != 10 {
		t.Fatalf("%s: %v, %v", file, c, err)
	}
	checkContents(t, c)
	if len(*warnings) != 1 || !strings.Contains((*warnings)[0], "skipping the checkpoint /disk/run/checkpoints/step-00000020: "+file) {
		t.Errorf("the warnings are %q", *warnings)
	}
	sentence(t, (*warnings)[0])
	goOn(t, o, 10)
	if err := attempt(o, 20); err != nil {
		t.Fatal(err)
	}
	if c, err = Latest(o); err != nil || c.Step != 20 {
		t.Fatalf("after step 20 was written again: %v, %v", c, err)
	}
	checkContents(t, c)
}

// Files are cut at the ends and inside of each of their parts: the length of the
// header (8 bytes), the header, its padding, the data.
func TestCut(t *testing.T) {
	for _, name := range newest {
		m, o, _ := stage(t, true)
		was, err := m.Contents(filepath.Join(o.folder(), nameOf(20), name))
		if err != nil {
			t.Fatal(err)
		}
		size := len(was)
		data := size / 2
		if name != manifestName {
			data = 8 + int(was[0]) + int(was[1])<<8
		}
		for _, length := range []int{0, 1, 7, 8, 9, data / 2, data - 1, data, data + 1, (data + size) / 2, size - 2, size - 1, size + 1} {
			m, o, warnings := stage(t, true)
			spoil(t, m, o, 20, name, func(b []byte) []byte { return append(b, 'x')[:length] })
			if name == manifestName && length == size-1 {
				if c, err := Latest(o); err != nil || c.Step != 20 {
					t.Errorf("without the last line end: %v, %v", c, err)
				}
				continue
			}
			fallsBack(t, o, warnings, name)
		}
	}
}

// A wrong bit anywhere is found, or means nothing, as the case of a letter in a
// name of checkpoint.json.
func TestWrongBit(t *testing.T) {
	for _, name := range newest {
		for i, done := 0, false; !done; i += 11 {
			m, o, warnings := stage(t, true)
			spoil(t, m, o, 20, name, func(b []byte) []byte {
				if done = i+11 >= len(b); i < len(b) {
					b[i] ^= 1 << (i % 8)
				}
				return b
			})
			c, err := Latest(o)
			switch {
			case err != nil && strings.Contains(err.Error(), "has version 3"): // which may be another program's
			case err != nil:
				t.Fatal(err)
			case name == manifestName && c.Step == 20:
				checkContents(t, c)
			default:
				*warnings = nil
				fallsBack(t, o, warnings, name)
			}
		}
	}
}

func TestMissing(t *testing.T) {
	for _, name := range newest {
		m, o, warnings := stage(t, true)
		if err := m.Drop(filepath.Join(o.folder(), nameOf(20), name)); err != nil {
			t.Fatal(err)
		}
		fallsBack(t, o, warnings, name)
	}
}

// A file of another rank or step has a checksum of its own, but not this one.
func TestSwapped(t *testing.T) {
	m, o, warnings := stage(t, true)
	a, b := newest[3], newest[4]
	var was [2][]byte
	for i, name := range []string{a, b} {
		var err error
		if was[i], err = m.Contents(filepath.Join(o.folder(), nameOf(20), name)); err != nil {
			t.Fatal(err)
		}
	}
	spoil(t, m, o, 20, a, func([]byte) []byte { return was[1] })
	spoil(t, m, o, 20, b, func([]byte) []byte { return was[0] })
	fallsBack(t, o, warnings, a)
}

// A run that goes on before a damaged checkpoint removes it with its next save, which comes
// earlier: nobody reads it any more, and readers would warn of it for ever.
func TestDamagedLaterStep(t *testing.T) {
	m, o, warnings := stage(t, true)
	spoil(t, m, o, 20, newest[1], func(b []byte) []byte { return b[:9] })
	if err := attempt(o, 15); err != nil {
		t.Fatal(err)
	}
	if got, want := names(t, o), []string{nameOf(10), nameOf(15)}; !slices.Equal(got, want) {
		t.Errorf("there are %q, want %q", got, want)
	}
	if c, err := Latest(o); err != nil || c.Step != 15 || len(*warnings) != 0 {
		t.Errorf("the latest is %+v, %v, with the warnings %q", c, err, *warnings)
	}
}

func TestAllDamaged(t *testing.T) {
	m, o, warnings := stage(t, true)
	for _, step := range []int{10, 20} {
		spoil(t, m, o, step, newest[1], func(b []byte) []byte { return b[:9] })
	}
	_, err := Latest(o)
	if err == nil || errors.Is(err, ErrNone) || !strings.Contains(err.Error(), "all 2 checkpoints in /disk/run/checkpoints are damaged") {
		t.Errorf("got %v", err)
	}
	if len(*warnings) != 2 {
		t.Errorf("the warnings are %q", *warnings)
	}
}

// A checkpoint of another version is whole: nobody is told to give the run up, and no run goes on from an older
// one, whose next checkpoint would replace it.
func TestOtherVersion(t *testing.T) {
	m, o, warnings := stage(t, true)
	spoil(t, m, o, 20, manifestName, func(b []byte) []byte { return bytes.Replace(b, []byte(`"version": 1`), []byte(`"version": 2`), 1) })
	_, err := Latest(o)
	if err == nil || len(*warnings) != 0 || !strings.Contains(err.Error(), "use the program that wrote it") ||
		!strings.Contains(err.Error(), "or move the checkpoint out of /disk/run/checkpoints to resume from an older one") {
		t.Errorf("got %v and the warnings %q", err, *warnings)
	}
	if err := m.Drop(filepath.Join(o.folder(), nameOf(20), manifestName)); err != nil {
		t.Fatal(err)
	}
	if c, err := Latest(o); err != nil || c.Step != 10 {
		t.Errorf("without it: %v, %v", c, err)
	}
}

// refusing is a disk that refuses to open files whose path holds a word.
type refusing struct {
	disk.FS
	word string
}

func (r refusing) Open(name string) (disk.Input, error) {
	if strings.Contains(name, r.word) {
		return nil, &fs.PathError{Op: "open", Path: name, Err: syscall.EACCES}
	}
	return r.FS.Open(name)
}

// Checkpoints that the system refuses to read may be whole: no advice gives them up, and an older one does not stand in
// for the newest.
func TestRefused(t *testing.T) {
	for word, want := range map[string]struct {
		step int // that is found, or 0
		says string
	}{
		"/checkpoints/":                    {0, "step-00000020 may be whole and was not read: checkpoint.json cannot be opened: permission denied; give this user the right to it; then resume again"},
		"step-00000020/model-00002":        {0, "step-00000020 may be whole and was not read: model-00002-of-00002.safetensors cannot be opened: permission denied; give this user the right to it; then"},
		"step-00000020/" + manifestName:    {0, "or move the checkpoint out of /disk/run/checkpoints to resume from an older one"},
		"step-00000010/optim-00001-of-000": {20, ""},
	} {
		m, o, warnings := stage(t, true)
		o.FS = refusing{m, word}
		c, err := Latest(o)
		switch {
		case want.step > 0 && (err != nil || c.Step != want.step):
			t.Errorf("%s: %v, %v", word, c, err)
		case want.step == 0 && (err == nil || errors.Is(err, ErrNone) || strings.Contains(err.Error(), "damaged") || !strings.Contains(err.Error(), want.says)):
			t.Errorf("%s: %v", word, err)
		case want.step == 0:
			sentence(t, err.Error())
		}
		if len(*warnings) != 0 {
			t.Errorf("%s: the warnings are %q", word, *warnings)
		}
	}
	// Behind a newest one that is damaged there is none that may be older.
	m, o, warnings := stage(t, true)
	spoil(t, m, o, 20, newest[1], func(b []byte) []byte { return b[:9] })
	o.FS = refusing{m, "step-00000010"}
	if _, err := Latest(o); err == nil || !strings.HasSuffix(err.Error(), "then resume again") || len(*warnings) != 1 {
		t.Errorf("with a damaged one after it: %v, %q", err, *warnings)
	}
}

// Reading fails once at any operation: an error says so, unless what failed was the closing of a file that
// was read.
func TestUnreadable(t *testing.T) {
	failed := 0
	for n, done := 1, false; !done; n++ {
		m, o, warnings := stage(t, true)
		m.Arm(n, disktest.Fails)
		c, err := Latest(o)
		done = m.Ops() < n
		switch {
		case len(*warnings) != 0:
			t.Errorf("operation %d: %q", n, *warnings)
		case err != nil && errors.Is(err, ErrNone), err == nil && c.Step != 20:
			t.Errorf("operation %d: %v, %v", n, c, err)
		case err != nil:
			failed++
		}
	}
	if failed < 11 { // the list, and opening and reading of five files
		t.Errorf("only %d failures were errors", failed)
	}
}

// spoilt is a disk on which files can be opened and not read.
type spoilt struct{ disk.FS }

type spoiltFile struct {
	disk.Input
	name string
}

func (d spoilt) Open(name string) (disk.Input, error) {
	f, err := d.FS.Open(name)
	return spoiltFile{f, name}, err
}

func (f spoiltFile) ReadAt([]byte, int64) (int, error) {
	return 0, &fs.PathError{Op: "read", Path: f.name, Err: syscall.EIO}
}

// A file that could be read when it was verified, and cannot be any more, is named once.
func TestUnreadableAfterwards(t *testing.T) {
	m, o, _ := stage(t, true)
	c, err := Latest(o)
	if err != nil {
		t.Fatal(err)
	}
	c.disk = spoilt{m}
	path := filepath.Join(c.Path, fileName(model, 0, c.Ranks))
	if _, err := c.Model(0); err == nil || err.Error() != "cannot read "+path+": "+syscall.EIO.Error() {
		t.Error(err)
	}
}

// A manifest whose version is no number is refused in a sentence that names the key.
func TestManifestWithoutANumber(t *testing.T) {
	_, err := parseManifest([]byte(`{"version": "1"}`), 1)
	if err == nil || err.Error() != "checkpoint.json is damaged: version has the wrong kind of value (string)" {
		t.Errorf("the error is %v", err)
	}
}

// The manifest is sealed again after each change: what is refused here is refused
// for what it says.
func TestManifestRefused(t *testing.T) {
	for want, change := range map[string]func(m *manifest){
		"it has no version":   func(m *manifest) { m.Version = 0 },
		"belongs to step 21":  func(m *manifest) { m.Step = 21 },
		"4 files for 0 ranks": func(m *manifest) { m.Ranks = 0 },
		"3 files for 2 ranks": func(m *manifest) { m.Files = m.Files[:3] },
		`expected model-00001-of-00002.safetensors, got "../../secret"`: func(m *manifest) { m.Files[0].Name = "../../secret" },
		"bytes; expected 999": func(m *manifest) { m.Files[0].Bytes = 999 },
	} {
		m, o, warnings := stage(t, true)
		spoil(t, m, o, 20, manifestName, func(b []byte) []byte {
			var x manifest
			if err := json.Unmarshal(b, &x); err != nil {
				t.Fatal(err)
			}
			change(&x)
			b, err := x.encode()
			if err != nil {
				t.Fatal(err)
			}
			return b
		})
		if c, err := Latest(o); err != nil || c.Step != 10 {
			t.Errorf("%s: %v, %v", want, c, err)
		}
		if len(*warnings) != 1 || !strings.Contains((*warnings)[0], want) {
			t.Errorf("%s: %q", want, *warnings)
		}
	}
}

// A manifest may say that a file is empty, and the file may be: it is refused in words.
func TestEmptyFile(t *testing.T) {
	for size, want := range []string{"got only 0 bytes", "got only 1 bytes"} {
		m, o, warnings := stage(t, true)
		content := make([]byte, size)
		spoil(t, m, o, 20, newest[1], func([]byte) []byte { return content })
		spoil(t, m, o, 20, manifestName, func(b []byte) []byte {
			var x manifest
			if err := json.Unmarshal(b, &x); err != nil {
				t.Fatal(err)
			}
			x.Files[0].Bytes, x.Files[0].SHA256 = int64(size), fmt.Sprintf("%x", sha256.Sum256(content))
			b, err := x.encode()
			if err != nil {
				t.Fatal(err)
			}
			return b
		})
		if c, err := Latest(o); err != nil || c.Step != 10 {
			t.Errorf("%d bytes: %v, %v", size, c, err)
		}
		if len(*warnings) != 1 || !strings.Contains((*warnings)[0], want) {
			t.Errorf("%d bytes: %q", size, *warnings)
		}
	}
}

// Whatever is accepted names only files of its own folder and survives a round
// trip. The checksum is put right first: otherwise nothing would be accepted.
func FuzzManifest(f *testing.F) {
	m := manifest{Version: Version, Meta: metaOf(7), Ranks: 1, Files: []File{{fileName(model, 0, 1), 10, "ab"}, {fileName(optim, 0, 1), 12, "cd"}}}
	good, err := m.encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"version":1,"step":7,"ranks":1,"files":[{"name":"/x"},{}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var m manifest
		if json.Unmarshal(text, &m) == nil {
			if sealed, err := m.encode(); err == nil {
				text = sealed
			}
		}
		got, err := parseManifest(text, 7)
		if err != nil {
			if strings.Contains(err.Error(), "checksum") && json.Valid(text) && m.Version == Version {
				t.Errorf("a sealed manifest is refused: %v", err)
			}
			return
		}
		for _, file := range got.Files {
			if filepath.Base(file.Name) != file.Name {
				t.Errorf("accepted the file %q", file.Name)
			}
		}
		again, err := got.encode()
		if err != nil {
			t.Fatal(err)
		}
		if two, err := parseManifest(again, 7); err != nil || fmt.Sprint(two.Files) != fmt.Sprint(got.Files) {
			t.Errorf("%v became %v, %v", got, two, err)
		}
	})
}

// A file that is there and was not read may be whole: nobody is told that such a checkpoint is
// damaged, and nobody that one may be whole whose files are missing or no files at all.
func TestWhatMayBeWhole(t *testing.T) {
	for err, whole := range map[error]bool{
		syscall.EACCES: true, syscall.EPERM: true, syscall.EMFILE: true, syscall.ENFILE: true, syscall.EIO: true, syscall.ESTALE: true, syscall.ETIMEDOUT: true,
		&otherVersion{9}: true,
		syscall.ENOENT:   false, syscall.ENOTDIR: false, errors.New("is damaged"): false,
	} {
		if got := isRefused(fmt.Errorf("model: %w", err)); got != whole {
			t.Errorf("%v: may be whole is %v", err, got)
		}
	}
}

// A manifest lists the files of all ranks in order: one that is missing, more, or has another
// name at any place is refused.
func TestFilesOfAManifest(t *testing.T) {
	for _, ranks := range []int{1, 2, 3} {
		var files []File
		for rank := range ranks {
			for k := range kinds {
				files = append(files, File{Name: fileName(k, rank, ranks)})
			}
		}
		m := manifest{Ranks: ranks, Files: files}
		if err := m.checkFiles(); err != nil {
			t.Error(err)
		}
		for i := range files {
			wrong := slices.Clone(files)
			wrong[i].Name = "../" + wrong[i].Name
			m.Files = wrong
			if err := m.checkFiles(); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("expected %s, got %q", files[i].Name, wrong[i].Name)) {
				t.Errorf("file %d of %d ranks: %v", i, ranks, err)
			}
			m.Files = slices.Delete(slices.Clone(files), i, i+1)
			if m.checkFiles() == nil {
				t.Errorf("file %d of %d ranks is missing, and nothing says so", i, ranks)
			}
		}
		m.Files = append(slices.Clone(files), files[0])
		if m.checkFiles() == nil {
			t.Errorf("%d ranks have a file more, and nothing says so", ranks)
		}
	}
	if (&manifest{}).checkFiles() == nil {
		t.Error("a manifest without ranks is accepted")
	}
}

// What cannot be removed is told of by name, and a full disk by what the checkpoint needs.
func TestWordsOfFailures(t *testing.T) {
	m, o, said := stage(t, true)
	s := mustOpen(t, o)
	defer mustClose(t, s)
	for want, do := range map[string]func(){
		"cannot remove the checkpoint " + filepath.Join(o.folder(), nameOf(20)): func() { s.discard(20) },
		"cannot look for temporary files of an earlier run in " + o.folder():    func() { s.clean() },
		"cannot remove " + o.folder() + "/x":                                    func() { s.remove(o.folder() + "/x") },
	} {
		*said = nil
		m.Arm(1, disktest.Fails)
		if do(); len(*said) != 1 || !strings.HasPrefix((*said)[0], want) {
			t.Errorf("%q, want %q", *said, want)
		}
		m.Disarm()
	}
	for _, x := range []struct {
		err  error
		need int64
		want string
	}{
		{syscall.ENOSPC, 3 << 20, "the checkpoint of step 7 needs 4 MiB, but there is not enough space"},
		{syscall.EDQUOT, 1, "the checkpoint of step 7 needs 1 MiB, but there is not enough space"},
		{syscall.ENOSPC, 0, "cannot write the checkpoint of step 7 to " + o.folder()},
		{syscall.EIO, 5, "cannot write the checkpoint of step 7 to " + o.folder()},
	} {
		err := o.failed(7, x.need, x.err)
		if !strings.HasPrefix(err.Error(), x.want) || !strings.HasSuffix(err.Error(), "; earlier checkpoints are complete") || !errors.Is(err, x.err) {
			t.Errorf("%v, want %s", err, x.want)
		}
	}
	if err := o.failed(20, 0, syscall.EIO); !strings.HasSuffix(err.Error(), "; earlier checkpoints are complete") {
		t.Errorf("step 10 is there, and the error is %v", err)
	}
	none := o
	none.Dir += "-new"
	for _, need := range []int64{0, 5} {
		if err := none.failed(7, need, syscall.ENOSPC); strings.Contains(err.Error(), "earlier") {
			t.Errorf("there is no checkpoint, and the error is %v", err)
		}
	}
	m.Arm(1, disktest.Fails)
	defer m.Disarm()
	if err := o.failed(7, 0, syscall.EIO); !strings.HasSuffix(err.Error(), "; earlier checkpoints, if any, are complete") {
		t.Errorf("whether there are checkpoints is not known, and the error is %v", err)
	}
}
