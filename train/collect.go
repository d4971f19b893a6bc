// This file owns how the process with rank 0 gets what all ranks save.

package train

import "encoding/json"

// collect returns what all ranks save to the process with rank 0, and nil to others.
func (t *Trainer) collect(own []snapshot) ([]snapshot, error) {
	p := t.cfg.Process
	if p == nil {
		return own, nil
	}
	var all []snapshot
	here := map[int]int{}
	for i, rank := range p.Ranks {
		here[rank] = i
	}
	for rank := range t.cfg.Layout.Ranks() {
		var mine snapshot
		i, owned := here[rank]
		if owned {
			mine = own[i]
		}
		var s snapshot
		for _, part := range []struct{ from, to *[]heldTensor }{{&mine.model, &s.model}, {&mine.optim, &s.optim}} {
			got, err := t.passOn(*part.from, owned)
			if err != nil {
				return nil, err
			}
			*part.to = got
		}
		if p.Speaks() {
			all = append(all, s)
		}
	}
	return all, nil
}

// passOn passes tensors from the process that owns them to the one with rank 0.
func (t *Trainer) passOn(ts []heldTensor, owned bool) ([]heldTensor, error) {
	p := t.cfg.Process
	var text []byte
	if owned {
		var err error
		if text, err = json.Marshal(ts); err != nil { // names and shapes
			return nil, err
		}
	}
	// said returns what the owner says: the others say nothing.
	said := func(mine []byte) ([]byte, error) {
		texts, err := p.Control.Gather(mine)
		for _, text := range texts {
			if len(text) > 0 {
				return text, err
			}
		}
		return nil, err
	}
	text, err := said(text)
	if err != nil {
		return nil, err
	}
	var out []heldTensor
	if err := json.Unmarshal(text, &out); err != nil {
		return nil, err
	}
	for i := range out {
		n := int(out[i].Bytes())
		var rest, to []byte
		if owned {
			rest = bytesOf(ts[i].data)
		}
		if p.Speaks() {
			out[i].data = make([]float32, n/4)
			to = bytesOf(out[i].data)
		}
		for at := 0; at < n; at += pieceBytes {
			var piece []byte
			if owned {
				piece = rest[at:min(n, at+pieceBytes)]
			}
			got, err := said(piece)
			if err != nil {
				return nil, err
			}
			if to != nil {
				copy(to[at:], got)
			}
		}
	}
	return out, nil
}
