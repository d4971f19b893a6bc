// This file owns the test of SyncAll: what it has synced outlives a loss of power.

package disk_test

import (
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
