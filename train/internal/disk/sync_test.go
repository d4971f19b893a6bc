// This file owns tests on a simulated disk: what was synced outlives a loss of power, and no error
// of the disk is dropped.

package disk_test

import (
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/stowage-dev/stowage/train/internal/disk"
	"github.com/stowage-dev/stowage/train/internal/disk/disktest"
)

func TestSyncAllOutlivesALossOfPower(t *testing.T) {
	for _, synced := range []bool{false, true} {
		d := disktest.New()
		p := d.Process("writer")
		if _, err := disk.MakeAll(p, "/disk/run"); err != nil {
			t.Fatal(err)
		}
		files := map[string]string{"/disk/run/a/one": "1", "/disk/run/a/b/two": "22", "/disk/run/a/b/three": "333", "/disk/run/a/c/four": "4"}
		for _, dir := range []string{"/disk/run/a", "/disk/run/a/b", "/disk/run/a/c"} {
			if err := p.Mkdir(dir); err != nil {
				t.Fatal(err)
			}
		}
		for name, text := range files {
			out, err := p.Create(name)
			if err == nil {
				_, err = out.Write([]byte(text))
			}
			if err == nil {
				err = out.Close()
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if err := p.SyncDir("/disk/run"); err != nil { // the name of the outermost folder
			t.Fatal(err)
		}
		if synced {
			if err := disk.SyncAll(p, "/disk/run/a"); err != nil {
				t.Fatal(err)
			}
		}
		d.Lose(nil)
		for name, want := range files {
			if got, err := d.Contents(name); (err == nil && string(got) == want) != synced {
				t.Errorf("synced %v: %s holds %q, %v", synced, name, got, err)
			}
		}
	}
}

// An operation that fails is the error of the whole, and leaves no file open.
func TestNoErrorIsDropped(t *testing.T) {
	for name, do := range map[string]func(p *disktest.Process) error{
		"SyncAll":   func(p *disktest.Process) error { return disk.SyncAll(p, "/disk/run") },
		"MakeAll":   func(p *disktest.Process) error { _, err := disk.MakeAll(p, "/disk/run/x/y/z"); return err },
		"WriteFile": func(p *disktest.Process) error { return disk.WriteFile(p, "/disk/run/a/one", []byte("new")) },
		"Claim": func(p *disktest.Process) error {
			l, err := disk.Claim(p, "/disk/run/x/y")
			if err != nil {
				return err
			}
			return errors.Join(l.Held(), l.Close())
		},
	} {
		for n := 1; ; n++ {
			d := disktest.New()
			p := d.Process("writer")
			if _, err := disk.MakeAll(p, "/disk/run/a"); err != nil {
				t.Fatal(err)
			}
			for _, file := range []string{"/disk/run/a/one", "/disk/run/two"} {
				out, err := p.Create(file)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := out.Write([]byte(file)); err != nil {
					t.Fatal(err)
				}
				if err := out.Close(); err != nil {
					t.Fatal(err)
				}
			}
			p.Arm(n, disktest.Fails)
			err := do(p)
			if p.Hit() == "" {
				if err != nil || n < 4 {
					t.Errorf("%s without a fault, after %d operations: %v", name, n, err)
				}
				break
			}
			// A lock without a number in it is a lock.
			if !errors.Is(err, syscall.EIO) && !(name == "Claim" && strings.HasPrefix(p.Hit(), "writelock ")) {
				t.Errorf("%s drops the error of %q: %v", name, p.Hit(), err)
			}
			if open := p.OpenFiles(); len(open) > 0 {
				t.Errorf("%s leaves %v open after %q", name, open, p.Hit())
			}
		}
	}
}
