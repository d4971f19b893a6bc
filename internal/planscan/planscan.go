// Package planscan plans every launch file below some folders and counts what came of it:
// how many jobs are planned as they are, and why others are refused.
//
// This file owns the search for files and the counts, golden.go measured peaks beside them,
// and text.go how all of it is shown.
package planscan

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/config"
	"github.com/stowage-dev/stowage/plan/megatron"
)

// Names are the patterns of the files that are launch files unless others are given.
var Names = []string{"*.sh", "*.sbatch", "*.slurm", "*.yaml", "*.yml"}

// Unread is the reason of a file that cannot be read.
const Unread = "cannot be read"

// Contradiction is the reason of a job that Megatron-LM refuses as well: sizes that do not
// divide, or settings that exclude each other.
const Contradiction = "settings that Megatron-LM refuses"

// Row is what came of a file.
type Row struct {
	File    string `json:"file"`
	Planned bool   `json:"planned"`
	Reason  string `json:"reason,omitempty"` // why it is refused
	Text    string `json:"text,omitempty"`   // the refusal in one sentence
}

// Count is how many files have a reason.
type Count struct {
	Reason string `json:"reason"`
	Files  int    `json:"files"`
}

// Report is what came of all files.
type Report struct {
	Files   int     `json:"files"`
	Planned int     `json:"planned"`
	Refused []Count `json:"refused"` // the most frequent first
	Rows    []Row   `json:"rows"`    // by file
	Golden  *Golden `json:"golden,omitempty"`
}

// mostFiles bounds a scan, so that the root of a disk ends in a sentence.
const mostFiles = 100_000

// Find returns the files below the folders whose names match one of the patterns, sorted
// and each once. A file among the folders counts itself, whatever its name.
func Find(folders, patterns []string) ([]string, error) {
	for _, p := range patterns {
		if _, err := filepath.Match(p, ""); err != nil {
			return nil, fmt.Errorf("%q is not a pattern of names; expected one such as *.sh", p)
		}
	}
	var files []string
	for _, folder := range folders {
		info, err := os.Stat(folder)
		if err != nil {
			return nil, fmt.Errorf("%s cannot be read: %w", folder, input.Cause(err))
		}
		if link, err := os.Lstat(folder); err == nil && info.IsDir() && !link.IsDir() {
			folder += string(os.PathSeparator) // WalkDir does not follow a link
		}
		err = filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return fmt.Errorf("%s cannot be read: %w", path, input.Cause(err))
			case d.IsDir():
				return nil
			case path != folder && !slices.ContainsFunc(patterns, func(p string) bool { ok, _ := filepath.Match(p, d.Name()); return ok }):
				return nil
			case len(files) == mostFiles:
				return fmt.Errorf("there are more than %d files below %s; expected a smaller folder", mostFiles, folder)
			}
			// A link may lead nowhere, and a pipe in a folder may never end.
			if info, err := os.Stat(path); err == nil && (info.Mode().IsRegular() || path == folder && !info.IsDir()) {
				files = append(files, path)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	slices.Sort(files)
	return slices.Compact(files), nil
}

// Scan plans every file for the hardware and calls progress after each.
func Scan(files []string, hardware string, progress func(done, all int)) *Report {
	r := &Report{Files: len(files), Refused: []Count{}, Rows: []Row{}}
	counts := map[string]int{}
	for i, f := range files {
		row := Row{File: f}
		if err := predict(f, hardware); err == nil {
			row.Planned = true
			r.Planned++
		} else {
			row.Reason, row.Text = reason(err)
			counts[row.Reason]++
		}
		r.Rows = append(r.Rows, row)
		progress(i+1, len(files))
	}
	for kind, n := range counts {
		r.Refused = append(r.Refused, Count{kind, n})
	}
	slices.SortFunc(r.Refused, func(a, b Count) int {
		return cmp.Or(cmp.Compare(b.Files, a.Files), cmp.Compare(a.Reason, b.Reason))
	})
	return r
}

// predict returns why a file cannot be planned.
func predict(file, hardware string) error {
	s, _, err := config.Resolve(config.Input{Model: asPath(file), Hardware: hardware})
	if err != nil {
		return err
	}
	_, err = plan.Predict(s)
	return err
}

// asPath returns the path of a file so that it means one even if a preset has its name.
func asPath(file string) string {
	if filepath.IsAbs(file) {
		return file
	}
	return "." + string(filepath.Separator) + file
}

// reason returns why a job was refused, in general and in a sentence.
func reason(err error) (string, string) {
	var refused *megatron.Refused
	if errors.As(err, &refused) {
		return refused.Kind, refused.Text
	}
	var setting *memory.SettingError
	if errors.As(err, &setting) && setting.Err != nil {
		return Unread, input.Plain(setting.Err).Error() // the row names the file
	}
	return Contradiction, input.Plain(err).Error()
}
