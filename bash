bash
