// This file owns what a run knows of its steps before: it reads metrics.jsonl, keeps the
// lines of steps that are not repeated, and says once if it cannot read some.

package run

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train"
	"github.com/stowage-dev/stowage/train/internal/disk"
)

// longestLine limits the length of a line of metrics. A longer one is no line of a run.
const longestLine = 1 << 20

// history is what metrics.jsonl says of the steps before.
type history struct {
	loss  float64 // of the last step
	peaks []peak  // of each rank, in all steps, also in those that are repeated

	// Of the steps that are not repeated:
	tokens int64
	took   []float64 // seconds
	reruns int       // when the last one ended
}

// peak holds the highest use of device and host memory since a run began, resumptions
// included.
type peak struct {
	Device int64 `json:"peak_device_bytes"`
	Host   int64 `json:"peak_host_bytes"`
}

// most returns the higher of two peaks.
func (p peak) most(q peak) peak { return peak{max(p.Device, q.Device), max(p.Host, q.Host)} }

// fullest returns the peaks of the fullest ranks.
func fullest(ranks []peak) (p peak) {
	for _, q := range ranks {
		p = p.most(q)
	}
	return p
}

// higher returns the peaks of ranks from two parts of a run, which may have had different
// numbers of ranks.
func higher(a, b []peak) []peak {
	out := make([]peak, max(len(a), len(b)))
	for i := range out {
		if i < len(a) {
			out[i] = a[i]
		}
		if i < len(b) {
			out[i] = out[i].most(b[i])
		}
	}
	return out
}

// peaksOf returns the peaks of the ranks of a trainer, given those of the parts before.
func peaksOf(t *train.Trainer, before []peak) []peak {
	var now []peak
	for _, u := range t.Usage() {
		now = append(now, peak{int64(u.Kind[memory.Device].Peak), int64(u.Kind[memory.Host].Peak)})
	}
	return higher(before, now)
}

// openMetrics drops the lines of steps that are about to be repeated and those that
// cannot be read. It warns once if a step that is not repeated has no line.
func (f *folder) openMetrics(done int, warn func(string)) (err error) {
	path := f.path(metricsName)
	keep, err := f.readMetrics(done, warn)
	if err != nil {
		return fmt.Errorf("cannot read %s: %w%s", path, input.Cause(err), input.Denied(err))
	}
	size := keep.size
	if keep.text != nil {
		if err := disk.WriteFile(f.disk, path, keep.text); err != nil {
			return fmt.Errorf("cannot write %s: %w%s", path, input.Cause(err), input.Denied(err))
		}
		keep.size = int64(len(keep.text))
	}
	if keep.tail != nil {
		f.cut = &tail{size, keep.tail}
	}
	if f.metrics, err = f.disk.Append(path, keep.size); err != nil {
		return fmt.Errorf("cannot write %s: %w%s", path, input.Cause(err), input.Denied(err))
	}
	if err := f.disk.SyncDir(f.dir); err != nil {
		return fmt.Errorf("cannot write %s: %w%s", path, input.Cause(err), input.Denied(err))
	}
	return nil
}

// restoreMetrics writes back what openMetrics dropped.
func (f *folder) restoreMetrics() error {
	if f.cut == nil {
		return nil
	}
	out, err := f.disk.Append(f.path(metricsName), f.cut.size)
	if err != nil {
		return err
	}
	_, err = out.Write(f.cut.text)
	return errors.Join(err, out.Sync(), out.Close())
}

// kept is what stays of the metrics: so many bytes of the file, or other contents if
// lines between others are dropped. The contents begin with the same bytes.
type kept struct {
	size int64
	text []byte
	tail []byte // what the file has behind size; nil if there is no file
}

// readMetrics reads the metrics and returns what stays of them.
func (f *folder) readMetrics(done int, warn func(string)) (keep kept, err error) {
	in, err := f.disk.Open(f.path(metricsName))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if done > 0 {
			f.lack(done, 0, nil, warn)
		}
		return keep, nil
	case err != nil:
		return keep, err
	}
	defer in.Close()
	var bad []int                                  // numbers of lines
	var rest bytes.Buffer                          // what stays behind a line that is dropped
	lines, last, newest, dropped := 0, 0, 0, false // newest: the last step of those that stay
	var disorder string
	b := bufio.NewReaderSize(io.NewSectionReader(in, 0, in.Size()), int(min(longestLine, in.Size()+1)))
	for n := 1; ; n++ {
		raw, err := readLine(b)
		if err == io.EOF {
			break
		}
		if err != nil {
			return keep, err
		}
		var m struct {
			Step, Reruns  int
			Loss, Seconds float64
			Tokens        int64
			Ranks         []peak `json:"rank_peaks"`
		}
		if raw == nil || json.Unmarshal(raw, &m) != nil || m.Step < 1 {
			bad, dropped = append(bad, n), true
			continue
		}
		if m.Step <= last && disorder == "" {
			disorder = fmt.Sprintf("line %d is of step %d and comes after step %d", n, m.Step, last)
		}
		f.was.peaks = higher(f.was.peaks, m.Ranks)
		last = max(last, m.Step)
		switch {
		case m.Step > done:
			dropped = true
			continue
		case dropped:
			rest.Write(raw)
		default:
			keep.size += int64(len(raw))
		}
		lines++
		if m.Step > newest {
			newest, f.was.loss, f.was.reruns = m.Step, m.Loss, m.Reruns
		}
		f.was.tokens, f.was.took = f.was.tokens+m.Tokens, append(f.was.took, m.Seconds)
	}
	if lines < done {
		f.lack(done, lines, bad, warn)
	} else if disorder != "" && warn != nil {
		warn(fmt.Sprintf("%s was changed: %s; the lines stay, and the report shows them by step", f.path(metricsName), disorder))
	}
	if keep.tail, err = io.ReadAll(io.NewSectionReader(in, keep.size, in.Size()-keep.size)); err != nil {
		return keep, err
	}
	if rest.Len() > 0 {
		keep.text, err = io.ReadAll(io.NewSectionReader(in, 0, keep.size))
		keep.text = append(keep.text, rest.Bytes()...)
	}
	return keep, err
}

// readLine returns the next line with its end, nil for one that is too long, or io.EOF
// behind the last whole line: a killed process leaves half a line.
func readLine(b *bufio.Reader) ([]byte, error) {
	raw, err := b.ReadSlice('\n')
	if err != bufio.ErrBufferFull {
		return raw, err
	}
	for err == bufio.ErrBufferFull {
		_, err = b.ReadSlice('\n')
	}
	return nil, err
}

// lack warns of steps without a line.
func (f *folder) lack(done, lines int, bad []int, warn func(string)) {
	if warn == nil {
		return
	}
	var why string
	switch {
	case len(bad) == 1:
		why = fmt.Sprintf(", because line %d cannot be read", bad[0])
	case len(bad) > 1:
		words := strings.Fields(strings.Trim(fmt.Sprint(bad[:min(len(bad), 5)]), "[]"))
		why = fmt.Sprintf(", because %d lines cannot be read: %s", len(bad), strings.Join(words, ", "))
		if len(bad) > 5 {
			why += " and others"
		}
	}
	warn(fmt.Sprintf("%s lacks %d of the %d steps before%s; the report will lack them too, and the lines of other steps stay", f.path(metricsName), done-lines, done, why))
}
