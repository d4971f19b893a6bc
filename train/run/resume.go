// This file owns the options of a run that is resumed. They are in config.yaml, and in
// every checkpoint, so that a checkpoint alone is enough.

package run

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"syscall"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
	"github.com/stowage-dev/stowage/train/internal/disk"
)

// ResumeOptions reads the options of the run in a folder. If config.yaml is missing, empty
// or cut short, they are those in the last checkpoint, and [Job.Run] says so. It returns
// an *InputError if the folder holds no run, and another error if what it holds is damaged.
func ResumeOptions(dir string) (Options, error) { return resumeOptions(disk.OS{}, dir) }

func resumeOptions(d disk.FS, dir string) (Options, error) {
	o := DefaultOptions()
	file := filepath.Join(dir, configName)
	text, err := disk.ReadFile(d, file, mostConfig)
	problem := ""
	switch {
	case errors.Is(err, fs.ErrNotExist):
		problem = "is missing"
	case err != nil:
		if errors.Is(err, syscall.ENOTDIR) {
			return o, blame("Folder", fmt.Errorf("%s is a file; give the folder of the run", dir))
		}
		return o, fmt.Errorf("cannot read %s: %w%s", file, input.Cause(err), input.Denied(err))
	case blank(text):
		problem = "is empty"
	case cutShort(text):
		problem = "is cut short"
	}
	if problem == "" {
		if err := o.parse(file, text); err != nil {
			return o, err
		}
		o.read = text
		return o, nil
	}
	c, err := checkpoint.Latest(checkpoint.Options{Dir: dir, FS: d})
	if errors.Is(err, checkpoint.ErrNone) {
		if text == nil {
			return o, blame("Resume", fmt.Errorf("there is no run in %s; start one without resuming, or give the folder of another", dir))
		}
		return o, blame("Resume", fmt.Errorf("%s %s, and there is no checkpoint to take the options from; start the run again without resuming", file, problem))
	}
	if err != nil {
		return o, err
	}
	var saved string
	if json.Unmarshal(c.Run, &saved) != nil || saved == "" {
		o.note = fmt.Sprintf("%s %s, and the checkpoint was made by a version that kept no options; those that were not given are the defaults", file, problem)
		return o, nil
	}
	if err := o.parse(filepath.Join(c.Path, "checkpoint.json"), []byte(saved)); err != nil {
		return o, err
	}
	o.note = fmt.Sprintf("%s %s; the options are those of the checkpoint of step %d", file, problem, c.Step)
	return o, nil
}

// cutShort reports whether options that a run wrote lack their end: the line of the last
// key.
func cutShort(text []byte) bool {
	head := []byte(configHead)
	whole := bytes.Contains(text, []byte("\nkeep: ")) && bytes.HasSuffix(text, []byte("\n"))
	return bytes.HasPrefix(head, text) || bytes.HasPrefix(text, head) && !whole
}
